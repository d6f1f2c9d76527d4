import { expect, it } from 'vitest';
import { serviceArguments, serviceHelp } from './service-arguments.ts';

it.each<[string[], ReturnType<typeof serviceArguments>]>([
  [[], { configFile: undefined, isCheck: false }],
  [['--config', 'c.json'], { configFile: 'c.json', isCheck: false }],
  [['--config=c.json'], { configFile: 'c.json', isCheck: false }],
  [['--check', '--config', 'c.json'], { configFile: 'c.json', isCheck: true }],
  [['--config', 'c.json', '--check', '--help'], 'help'],
  [['-h'], 'help'],
  [['--version'], 'version'],
  [['-v'], 'version'],
])('%j', (args, given) => expect(serviceArguments(args)).toEqual(given));

it.each([
  [['--conf', 'c.json'], 'command line: --conf: unknown option; did you mean --config?'],
  [['--chek'], 'command line: --chek: unknown option; did you mean --check?'],
  [['--port=1'], 'command line: --port: unknown option; see --help'],
  [['-x'], "command line: Unknown option '-x'; see --help"],
  [['c.json'], 'command line: "c.json" is not an option; write --config FILE'],
  [['--config'], 'command line: --config needs a file name'],
  [['--config='], 'command line: --config needs a file name'],
  [['--help=yes'], "command line: Option '-h, --help' does not take an argument; see --help"],
])('%j is refused in one line', (args, message) => {
  expect(() => serviceArguments(args)).toThrow(expect.objectContaining({ code: 'CONFIG', message }));
});

it('the help names every option, and the page', () => {
  for (const said of ['docs/coordinator.md', '--config FILE', '--check', '--version', '--help'])
    expect(serviceHelp('coordinator')).toContain(said);
});

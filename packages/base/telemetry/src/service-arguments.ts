/** What may stand behind the name of a service's program. Nothing else is taken: an option that is not read is one that is believed. */
import { parseArgs } from 'node:util';
import { KvError, nearest } from '@kvtier/errors';

export interface ServiceArguments {
  /** Its configuration is to be looked at, and nothing else. */
  readonly isCheck: boolean;
  /** Of --config; undefined: the environment has it. */
  readonly configFile: string | undefined;
}

const options = {
  config: { type: 'string' },
  check: { type: 'boolean' },
  help: { type: 'boolean', short: 'h' },
  version: { type: 'boolean', short: 'v' },
} as const;

/** `name`: the service's, which is also that of its page. */
export const serviceHelp = (name: string): string => `kvtier's ${name}, configured by docs/${name}.md

  --config FILE   its configuration, JSON; without it the environment variable KVTIER_CONFIG holds the same
  --check         looks at the configuration and the files that it names, and starts nothing: 0, or what is wrong
  --version       its version
  --help          this text
`;

/** @throws KvError CONFIG */
export function serviceArguments(args: readonly string[]): ServiceArguments | 'help' | 'version' {
  const unknown = args.map((arg) => /^--([^=]+)/.exec(arg)?.[1]).find((name) => name && !Object.hasOwn(options, name));
  if (unknown !== undefined) {
    const near = nearest(unknown, Object.keys(options));
    throw refused(`--${unknown}: unknown option; ${near === undefined ? 'see --help' : `did you mean --${near}?`}`);
  }
  const { values, positionals } = parsed(args);
  if (values.help) return 'help';
  if (values.version) return 'version';
  if (positionals.length > 0) throw refused(`"${positionals[0]}" is not an option; write --config FILE`);
  if (values.config === '') throw refused('--config needs a file name');
  return { configFile: values.config, isCheck: values.check === true };
}

function parsed(args: readonly string[]) {
  try {
    return parseArgs({ args: [...args], options, allowPositionals: true, strict: true });
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (code === 'ERR_PARSE_ARGS_INVALID_OPTION_VALUE' && message.includes('--config'))
      throw refused('--config needs a file name');
    throw refused(`${message.split('\n')[0]!.replace(/\.$/, '').split('. ')[0]}; see --help`);
  }
}

const refused = (what: string): KvError => new KvError('CONFIG', `command line: ${what}`, { isFinal: true });

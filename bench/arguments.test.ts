/** What follows a suite's name is taken in both forms or refused in one line, by every suite, before it measures. */
import { readdirSync } from 'node:fs';
import { expect, it } from 'vitest';
import { argumentsOf } from './arguments.ts';
import type { Suite } from './figures.ts';

const takes = {
  options: { only: ['mixed', 'warm'], gbit: 'count', from: 'index', trace: 'text', verbose: 'flag' },
  words: ['25m', 'wide'],
  number: 'ROUNDS',
} as const;

it.each([
  ['--only=mixed,warm', '--gbit=10', '--from=0', '--trace=a/b', '--verbose', '25m', '3'],
  ['3', '25m', '--only', 'mixed,warm', '--gbit', '10', '--verbose', '--from', '0', '--trace', 'a/b'],
])('options have both forms: %s ...', (...args) => {
  expect(argumentsOf('x', args, takes)).toEqual({
    options: { only: ['mixed', 'warm'], gbit: 10, from: 0, trace: 'a/b', verbose: true },
    words: ['25m'],
    number: 3,
  });
});

it('what was not said is undefined, and a flag false', () => {
  const nothing = { only: undefined, gbit: undefined, from: undefined, trace: undefined, verbose: false };
  expect(argumentsOf('x', [], takes)).toEqual({ options: nothing, words: [], number: undefined });
});

const known = 'there are: 25m wide ROUNDS --only mixed,warm --gbit N --from N --trace TEXT --verbose';
it.each([
  [['--quick'], "Unknown option '--quick'"],
  [['35m'], '"35m" is unknown'],
  [['3', '4'], '"4" is unknown'],
  [['0'], 'ROUNDS: "0" is not a whole number of 1 or more'],
  [['--only=typo'], '--only: "typo" is none of its parts'],
  [['--only=mixed,'], '--only: "" is none of its parts'],
  [['--gbit=fast'], '--gbit: "fast" is not a whole number of 1 or more'],
  [['--gbit=0'], '--gbit: "0" is not a whole number of 1 or more'],
  [['--verbose=1'], "Option '--verbose' does not take an argument"],
  [['--only'], "Option '--only <value>' argument missing"],
  [['--only', '--verbose'], "Option '--only' argument is ambiguous."],
])('refuses %j', (args, why) => {
  expect(() => argumentsOf('x', args, takes)).toThrow(`bench x: ${why}; ${known}`);
});

const suites = readdirSync(new URL('./suites', import.meta.url))
  .filter((name) => name.endsWith('.ts'))
  .map((name) => name.slice(0, -'.ts'.length));
const context = { scratchDir: '/nowhere', log: () => {} };

it.each(suites)('%s refuses what it does not know, in one line, before it measures', async (name) => {
  const suite = ((await import(`./suites/${name}.ts`)) as { default: Suite }).default;
  const unknown = [['--quick'], ...(suite.name === 'gpu' ? [] : [['typo']])]; // its cases are kernel_bench's
  for (const args of unknown) {
    const refused = suite.run({ ...context, args });
    await expect(refused).rejects.toMatchObject({ code: 'CONFIG', message: expect.stringMatching(/^.+; .*$/) });
  }
});

it.each([[['--trace=x', '--generated']], [['--generated', '--cost']], [['--cost', '--trace', 'x']]])(
  'routing refuses %j: one of them would be measured, and the other not',
  async (args) => {
    const { default: routing } = await import('./suites/routing.ts');
    await expect(routing.run({ ...context, args })).rejects.toMatchObject({ code: 'CONFIG' });
  },
);

/** docs/errors.md and the source name the same codes with the same meaning. */
import { codes } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { filesBelow, isTest, read } from './tree.ts';

const documented = Object.fromEntries(
  [...read('docs/errors.md').matchAll(/^\| `([A-Z_]+)` \| ([^|]+) \| ([^|]+) \|$/gm)].map((row) => [
    row[1]!,
    row[2]!.trim(),
  ]),
);

it('every code stands in docs/errors.md with the words of the source, and no other', () => {
  expect(documented, 'make packages/base/errors/src/codes.ts and the table of docs/errors.md equal').toEqual({
    ...codes,
  });
});

it('an engine worker, which has a JSON file, is told keys; options of the command stand in brackets behind them', () => {
  const help = filesBelow('packages/cli/src', ['options.ts']).map(read).join('\n');
  const options = [...new Set([...help.matchAll(/^ {2}(--[a-z][\w-]+) /gm)].map((match) => match[1]!))];
  expect(options.length).toBeGreaterThan(30);
  const bare = new RegExp(`["'\`][^"'\`]*(?<!\\()(?:${options.join('|')})\\b(?!-)`);
  const said = ['executor', 'cuda', 'prefix-cache', 'scheduler', 'worker']
    .flatMap((room) => filesBelow(`packages/engine/${room}`, ['.ts', '.cc', '.h', '.cu']))
    .filter((path) => !isTest(path) && !path.includes('/checks/'))
    .flatMap((path) => [...read(path).matchAll(/^(?!\s*(?:\/?\*|\/\/)).*$/gm)].map(([line]) => `${path}: ${line}`))
    .filter((line) => bare.test(line));
  expect(said, 'write KEY (--OPTION)').toEqual([]);
});

it('native code throws known codes only', () => {
  const unknown = filesBelow('packages', ['.cc', '.h'])
    .filter((path) => !isTest(path))
    .flatMap((path) =>
      [
        ...read(path)
          .replaceAll(/\/\/.*$/gm, '')
          .matchAll(/"([A-Z_]{2,}): /g),
      ]
        .filter((match) => !(match[1]! in codes))
        .map((match) => `${path}: ${match[1]}`),
    );
  expect(unknown, 'begin the message with a code of packages/base/errors/src/codes.ts').toEqual([]);
});

/** Every reason of a miss, a refusal or a short load stands in docs/reasons.md with what to do about it, and back. */
import { expect, it } from 'vitest';
import { namesIn, tableRows } from './docs.ts';
import { filesBelow, isTest, read } from './tree.ts';

const all = (text: string, pattern: RegExp): string[] => [...text.matchAll(pattern)].map((match) => match[1]!);
const quoted = (text: string): string[] => all(text, /'([a-z][\w -]*)'/g);
const source = (folder: string): string =>
  filesBelow(folder, ['.ts'])
    .filter((path) => !isTest(path))
    .map(read)
    .join('\n');
/** From a match to the next ';'. */
const statements = (text: string, start: RegExp): string =>
  [...text.matchAll(start)].map((match) => text.slice(match.index, text.indexOf(';', match.index))).join('\n');

const client = 'packages/connector/session-client/src';
const load = read(`${client}/load.ts`);
const store = read(`${client}/store.ts`);
const placement = source('packages/store/placement/src');
const session = source('packages/store/session/src');

/** Strings of a union type that name why. */
const union = (text: string, name: string): string[] =>
  quoted(statements(text, new RegExp(`export type ${name} =`, 'g')));

const connector = [
  ...[...source(client).matchAll(/count\([^;]*?'(lookup|load|store|prefetch)',\s*([^;]*?)\);/g)].flatMap(
    ([, operation, reason]) =>
      quoted(reason!)
        .filter((name) => name !== 'unknown')
        .map((name) => `${operation}: ${name}`),
  ),
  ...all(load, /#(?:close|fail|endEarly)\('([^']+)'/g).map((name) => `load: ${name}`),
  ...all(statements(store, /const whyNot\b/g), /: '(\w+)'/g).map((name) => `store: ${name}`),
];
const node = [
  ...all(`${placement}${session}`, /add\(\s*['`]((?:\w+\.(?:\$\{[^}]*\}\.)?)(?:refused|dropped)\.\w+)['`]/g),
  ...all(placement, /'(refused\.\w+)'/g).map((name) => `writedown.TIER.${name}`),
  ...all(placement, /\.(refused\.admission)`/g).map((name) => `writedown.TIER.${name}`),
  ...all(placement, /#refuse\('(\w+)'/g).map((name) => `writedown.TIER.refused.${name}`),
  ...quoted(statements(placement, /const refused =/g)).map((name) => `writedown.TIER.refused.${name}`),
  ...quoted(statements(placement, /\brefusal = (?!=)/g)).map((name) => `reserve.refused.${name}`),
  ...all(placement, /readonly reason: '' \| ([^;]+);/g)
    .flatMap(quoted)
    .map((name) => `prefetch.refused.${name}`),
  ...[...union(placement, 'LoadReason'), ...union(placement, 'FetchFailure')].map((name) => `load.ended.${name}`),
  ...all(session, /\brefuse\('(\w+)',/g).map((name) => `session.refused.${name}`),
  ...quoted(statements(session, /const refusal =/g)).map((name) => `session.refused.${name}`),
  ...(/quota\.refused\.\$\{/.test(placement) ? ['quota.refused.TIER'] : []),
].map((name) => name.replace(/\$\{[^}]*\}/, 'TIER'));

it('every reason stands in docs/reasons.md, and no other', () => {
  expect(namesIn('docs/reasons.md').toSorted(), 'make docs/reasons.md and the source equal').toEqual(
    [...new Set([...connector, ...node])].toSorted(),
  );
});

it('every reason says what happened and what to do', () => {
  expect(tableRows('docs/reasons.md').filter((row) => row.length !== 3 || row.some((cell) => cell === ''))).toEqual([]);
});

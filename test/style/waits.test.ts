/** Waits of tests for a condition: vitest's own limit is 1 s, which a busy machine alone takes. `expect.poll` has its limit in vitest's configuration. */
import { expect, it } from 'vitest';
import { filesBelow, read } from './tree.ts';

const sources = ['packages', 'services', 'bench', 'test'].flatMap((folder) => filesBelow(folder, ['.ts']));
const waits = /\bvi\s*\.wait(?:For|Until)(?:<[^>(]*>)?\(/g;
/** What brackets and commas mean nothing in. A regular expression stands where a value begins. */
const quoted =
  /'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|`(?:\\.|[^`\\])*`|\/\/[^\n]*|(?<=[(,=:[!&|?>]\s*)\/(?![/*])(?:\\.|\[(?:\\.|[^\]\n])*\]|[^/\\\n])+\//g;

/** The second argument of a call whose first one begins at `from`. */
function secondArgument(code: string, from: number): string | undefined {
  let [depth, begin] = [0, 0];
  for (let at = from; at < code.length; at++) {
    if ('([{'.includes(code[at]!)) depth++;
    if (')]}'.includes(code[at]!) && depth-- === 0) return begin === 0 ? undefined : code.slice(begin, at).trim();
    if (code[at] === ',' && depth === 0 && begin === 0) begin = at + 1;
  }
  return undefined;
}

/** Lines of waits that end after a second. */
function hasty(text: string): number[] {
  const code = text.replaceAll(quoted, (found) => found.replaceAll(/[^\n]/g, '_'));
  return [...code.matchAll(waits)].flatMap(({ 0: call, index }) => {
    const limit = secondArgument(code, index + call.length);
    const isNamed = limit !== undefined && limit !== '' && (!limit.startsWith('{') || /\btimeout\b|\.\.\./.test(limit));
    return isNamed ? [] : [code.slice(0, index).split('\n').length];
  });
}

it('finds what has no limit', () => {
  const call = (rest: string): string => `await vi.waitUntil(${rest});`;
  const long = [
    'is, patience',
    '() => f(1, 2), { timeout: 20_000 }',
    '() => /[)(]/.test(s), { ...patience, interval: 5 }',
  ];
  const short = [
    'is',
    '() => f(1, 2)',
    '() => of({ a, b }),\n',
    'is, { interval: 5 }',
    "() => a === ','",
    '() => /,/.test(a)',
  ];
  expect(long.flatMap((rest) => hasty(call(rest)))).toEqual([]);
  for (const rest of short) expect(hasty(`\n${call(rest)}`), rest).toEqual([2]);
});

it('every wait for a condition names a limit', () => {
  const found = sources.flatMap((path) => hasty(read(path)).map((line) => `${path}:${line}`));
  expect(found, 'give { timeout: 20_000 }').toEqual([]);
});

/** Whose signals are of one request, and go with it. */
const ofOneRequest = ['packages/coordinator/api-server/src/answers.ts', 'packages/coordinator/handoff/src/hand-off.ts'];

it('signals that outlive what waits for them are joined by what can be ended', () => {
  // Node 20 keeps a reference at each source to every AbortSignal.any that was made of it.
  const code = sources.filter((path) => path.startsWith('packages/') && !path.endsWith('.test.ts'));
  const found = code.filter((path) => /\bAbortSignal\.any\(/.test(read(path)));
  expect(found, 'use firstOf of @kvtier/runtime').toEqual(ofOneRequest);
});

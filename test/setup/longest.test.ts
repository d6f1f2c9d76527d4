import { expect, it } from 'vitest';
import { filesBelow } from '../style/tree.ts';
import { last, longest, placeOf } from './longest.ts';

it('each of the longest test files is there once, and comes before all others; the last ones come behind them', () => {
  const slow = ['packages', 'services', 'bench', 'test'].flatMap((folder) => filesBelow(folder, ['.slow.test.ts']));
  const sorted = slow.sort((a, b) => placeOf(a) - placeOf(b));
  const names = sorted.map((path) => path.split('/').slice(-2).join('/'));
  const of = (wanted: readonly string[]): string[] => wanted.map((name) => `${name}.slow.test.ts`);
  expect(names.slice(0, longest.length)).toEqual(of(longest));
  expect(names.slice(-last.length)).toEqual(of(last));
  const others = sorted.slice(longest.length, -last.length);
  expect(new Set(others.map(placeOf))).toEqual(new Set([longest.length]));
});

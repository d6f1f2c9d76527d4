import { expect, it } from 'vitest';
import { filesBelow } from '../style/tree.ts';
import { longest, placeOf } from './longest.ts';

it('each of the longest test files is there once, and comes before all others', () => {
  const slow = ['packages', 'services', 'bench', 'test'].flatMap((folder) => filesBelow(folder, ['.slow.test.ts']));
  const sorted = slow.sort((a, b) => placeOf(a) - placeOf(b));
  const names = sorted.map((path) => path.split('/').slice(-2).join('/'));
  expect(names.slice(0, longest.length)).toEqual(longest.map((name) => `${name}.slow.test.ts`));
  expect(new Set(sorted.slice(longest.length).map(placeOf))).toEqual(new Set([longest.length]));
});

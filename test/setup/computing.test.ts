import { expect, it } from 'vitest';
import { filesBelow } from '../style/tree.ts';
import { computing, filesOf } from './computing.ts';

it('every slow test is in one of the two lanes, and what runs by itself is all of it', () => {
  const slow = ['packages', 'services', 'bench', 'test'].flatMap((folder) => filesBelow(folder, ['.slow.test.ts']));
  expect(computing.filter((name) => !slow.some((path) => path.endsWith(name)))).toEqual([]);
  expect(filesOf('computing').include).toEqual(computing);
  expect(filesOf('waiting')).toEqual({ include: filesOf(undefined).include, exclude: computing });
  expect(filesOf(undefined).exclude).toEqual([]);
});

/** What many blocks of work do in a turn, and what those do who cannot wait for it. */
import { expect, it } from 'vitest';
import { BlockTurns } from './block-turns.ts';
import type { Steps } from './steps.ts';

function worksOf(turns: BlockTurns, ...lengths: number[]): string[] {
  const seen: string[] = [];
  function* work(name: number, length: number): Steps<void> {
    for (let at = 0; at < length; at++) {
      seen.push(`${name}.${at}`);
      yield;
    }
  }
  for (const [name, length] of lengths.entries()) turns.add(work(name, length), () => seen.push(`${name} done`));
  return seen;
}
const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

it('takes the first of it on by so much, and then less of it in what is left of the turn', async () => {
  const turns = new BlockTurns(4);
  const seen = worksOf(turns, 10, 2);
  expect(seen).toHaveLength(4);
  expect([turns.take(5), seen.length]).toEqual([true, 9]);
  worksOf(turns, 1);
  expect(seen).toHaveLength(9); // this turn has had its share
  await turn();
  expect(seen).toEqual([...Array.from({ length: 10 }, (_, at) => `0.${at}`), '0 done', '1.0', '1.1', '1 done']);
});

it('says when there is nothing to take', async () => {
  const turns = new BlockTurns(1);
  expect(turns.take(3)).toBe(false);
  const seen = worksOf(turns, 2);
  expect([turns.take(3), turns.take(3), seen]).toEqual([true, false, ['0.0', '0.1', '0 done']]);
  await turn();
  expect(seen).toHaveLength(3);
});

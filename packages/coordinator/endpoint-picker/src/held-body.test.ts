/** A body that is held, made one for its reader: whatever its pieces, no turn of the event loop copies much. */
import { expect, it } from 'vitest';
import { joined } from './held-body.ts';

const whole = Buffer.alloc(4_500_000, 'abcdefg');
const piecesOf = (bytes: number): Buffer[] =>
  Array.from({ length: Math.ceil(whole.length / bytes) }, (_, at) => whole.subarray(at * bytes, (at + 1) * bytes));

it.each([whole.length, 1_500_000, 1 << 20, 4_096])('pieces of %d bytes: a turn for each MiB', async (bytes) => {
  let turns = 0;
  let next = setImmediate(function count() {
    turns++;
    next = setImmediate(count);
  });
  const all = await joined(piecesOf(bytes), new AbortController().signal);
  clearImmediate(next);
  expect(Buffer.from(all).equals(whole)).toBe(true);
  expect(turns).toBe(4);
});

it('whoever has left meanwhile has nothing copied', async () => {
  const gone = new AbortController();
  const copied = joined([whole], gone.signal).then(({ byteLength }) => byteLength);
  gone.abort(new Error('left'));
  await expect(copied).rejects.toThrow('left');
});

it('nothing is nothing', async () => {
  expect((await joined([], new AbortController().signal)).byteLength).toBe(0);
});

import { setImmediate } from 'node:timers/promises';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { expect, it } from 'vitest';
import { decodeBatch } from './codec.ts';
import { PackedEncoder, type PackedEvents } from './packed-encoder.ts';

/** Removals of hashes that begin with `first`, as a block pool notes them. */
function removals(count: number, first: number): PackedEvents {
  const records = Array.from({ length: count }, (_, i) => [1, 8, 0, 4, 0, 0, first, i]);
  const words = Uint32Array.from(records.flat());
  return { words, wordCount: words.length, count, kinds: [], objects: [] };
}

it('payloads stay as they are, however many follow and whoever still holds one', async () => {
  const encoder = new PackedEncoder({});
  const held: { readonly payload: Buffer; readonly was: Buffer }[] = [];
  const encode = (count: number, first: number): Buffer => encoder.encode(removals(count, first), first, null);
  for (let i = 0; i < 600; i++) {
    const payload = encode(500, i);
    if (i % 7 === 0) held.push({ payload, was: Buffer.from(payload) }); // the memory of the others may be used again
    if (i % 50 === 0) await setImmediate();
  }
  const large = encode(20_000, 7); // more than a buffer takes
  expect(decodeBatch(large).events.length).toBe(20_000);
  expect(held.every(({ payload, was }) => payload.equals(was))).toBe(true);
  expect(decodeBatch(held[3]!.payload)).toMatchObject({ ts: 21, dataParallelRank: null });
});

/** What the kernel has given to this process, after a collection and the return of what it found. */
async function residentBytes(): Promise<number> {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  for (let i = 0; i < 4; i++) {
    collect();
    await setImmediate(); // the memory of what was collected comes back in a turn of its own
  }
  return process.memoryUsage.rss();
}

it('keeps the memory of as much as is held at a time for those that follow, and no longer than it lives', async () => {
  const heldBytes = 32 * 2 ** 20;
  const batch = removals(2_000, 1);
  const encoder = new PackedEncoder({}, heldBytes);
  let bytes = 0;
  while (bytes < 2 * heldBytes) bytes += encoder.encode(batch, 0, null).length;
  const kept = await residentBytes();
  encoder.close();
  const given = kept - (await residentBytes());
  expect(given).toBeGreaterThan(0.7 * heldBytes);
  expect(given).toBeLessThan(1.1 * heldBytes);
});

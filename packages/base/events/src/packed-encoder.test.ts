import { spawnSync } from 'node:child_process';
import { setImmediate } from 'node:timers/promises';
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

/**
 * What the kernel has given a process for `heldBytes` of payloads that nobody holds, by what it has back at the end of the encoder. In a
 * process of its own: in one that ran other tests, other memory goes back meanwhile.
 */
function givenBytes(heldBytes: number): number {
  const source = (name: string): string => JSON.stringify(new URL(name, import.meta.url).href);
  const program = `
    import { setImmediate } from 'node:timers/promises';
    import { PackedEncoder } from ${source('./packed-encoder.ts')};
    async function residentBytes() {
      for (let i = 0; i < 4; i++) {
        gc();
        await setImmediate(); // the memory of what was collected comes back in a turn of its own
      }
      return process.memoryUsage.rss();
    }
    const words = Uint32Array.from(Array.from({ length: 2_000 }, (_, i) => [1, 8, 0, 4, 0, 0, 1, i]).flat());
    const batch = { words, wordCount: words.length, count: 2_000, kinds: [], objects: [] };
    const encoder = new PackedEncoder({}, ${heldBytes});
    for (let bytes = 0; bytes < ${2 * heldBytes}; ) bytes += encoder.encode(batch, 0, null).length;
    const kept = await residentBytes();
    encoder.close();
    console.log(kept - (await residentBytes()));`;
  const args = ['--expose-gc', '--import', 'tsx', '--input-type=module', '-e', program];
  const { status, stdout, stderr } = spawnSync(process.execPath, args, { encoding: 'utf8', cwd: import.meta.dirname });
  expect(status, stderr).toBe(0);
  return Number(stdout);
}

it('keeps the memory of as much as is held at a time for those that follow, and no longer than it lives', () => {
  const heldBytes = 32 * 2 ** 20;
  const given = givenBytes(heldBytes);
  expect(given).toBeGreaterThan(0.7 * heldBytes);
  expect(given).toBeLessThan(1.1 * heldBytes);
});

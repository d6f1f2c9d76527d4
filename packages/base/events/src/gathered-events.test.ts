/** Packed events that come quickly go together: nothing is lost, nothing changes its place, and nothing waits longer than it may. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import fc from 'fast-check';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { decodeBatch } from './codec.ts';
import type { KvEvent } from './event.ts';
import { GatheredEvents } from './gathered-events.ts';
import { PackedEncoder, type PackedEvents } from './packed-encoder.ts';
import { KvEventPublisher } from './publisher.ts';
import { requestReplay } from './replay-client.ts';

const kinds: string[] = [];
const object = (hash: number): KvEvent => ({ type: 'BlockRemoved', blockHashes: [BigInt(hash)], medium: 'CPU' });

/** Removals of these hashes; those below 0 are objects. */
function packedOf(hashes: readonly number[]): PackedEvents {
  const records = hashes.map((hash) =>
    hash < 0 ? [0, 2] : [1, 6, 0, 2, 0, Buffer.from(Uint32Array.of(hash).buffer).readUInt32BE()],
  );
  const words = Uint32Array.from([...records.flat(), 77, 77]); // what follows is not of it
  const objects = hashes.filter((hash) => hash < 0).map((hash) => object(-hash));
  return { words, wordCount: words.length - 2, count: hashes.length, kinds, objects };
}

const hashesOf = (payload: Uint8Array): number[] =>
  decodeBatch(payload).events.map((event) => {
    const { blockHashes, medium } = event as Extract<KvEvent, { blockHashes: unknown }>;
    return Number(blockHashes[0]) * (medium === 'CPU' ? -1 : 1);
  });

it('as one batch they are what they were one after the other', () => {
  const encoder = new PackedEncoder({});
  const batches = fc.array(
    fc.array(
      fc.integer({ min: -1_000, max: 1_000 }).filter((hash) => hash !== 0),
      { maxLength: 900 },
    ),
  );
  fc.assert(
    fc.property(fc.array(batches, { maxLength: 3 }), (rounds) => {
      const gathered = new GatheredEvents();
      for (const round of rounds) {
        for (const hashes of round) {
          const packed = packedOf(hashes);
          expect(gathered.takes(packed)).toBe(true);
          gathered.add(packed);
          packed.words.fill(99); // its owner goes on
        }
        expect(gathered.count).toBe(round.flat().length);
        expect(hashesOf(encoder.encode(gathered.take(), 1, null))).toEqual(round.flat());
        expect([gathered.count, gathered.wordCount]).toEqual([0, 0]);
      }
    }),
    { numRuns: 30 },
  );
});

let folder: string;
let publisher: KvEventPublisher | undefined;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-gather-'));
});
afterEach(async () => {
  await publisher?.close();
  publisher = undefined;
  rmSync(folder, { recursive: true });
});
const start = async (gatherMs: number): Promise<KvEventPublisher> => {
  const replayEndpoint = `ipc://${folder}/replay`;
  publisher = await KvEventPublisher.start({ endpoint: `ipc://${folder}/pub`, replayEndpoint, gatherMs });
  return publisher;
};
const published = async ({ replayEndpoint }: KvEventPublisher): Promise<number[][]> => {
  const from = { endpoint: replayEndpoint!, maxMessageBytes: 1 << 20, curve: null };
  const batches: number[][] = [];
  const { signal } = new AbortController();
  for await (const { payload } of requestReplay({ ...from, signal, fromSeq: 0, deadlineMs: 5_000, silenceMs: 5_000 })) {
    if (payload.length > 0) batches.push(hashesOf(payload));
  }
  return batches;
};

it('the first of a while is a batch at once; those that follow are one, in time, without another step', async () => {
  const publisher = await start(300);
  const begunMs = performance.now();
  for (const hash of [1, 2, 3]) publisher.publishPacked(packedOf([hash]));
  expect(publisher.stats().publishedBatches).toBe(1);
  await vi.waitUntil(() => publisher.stats().publishedBatches === 2, { timeout: 20_000, interval: 5 });
  expect(performance.now() - begunMs).toBeGreaterThan(299);
  expect(await published(publisher)).toEqual([[1], [2, 3]]);
});

it('what others publish, a hole, and the end keep their places behind what was gathered', async () => {
  const publisher = await start(60_000);
  for (const hash of [1, 2]) publisher.publishPacked(packedOf([hash]));
  publisher.publish([object(3)]);
  publisher.publishPacked(packedOf([4]));
  publisher.skip();
  publisher.publishPacked(packedOf([5, -6]));
  publisher.publishPacked({ ...packedOf([7]), kinds: ['other'] });
  expect(publisher.stats()).toMatchObject({ publishedBatches: 5, lostBatches: 1, publishedEvents: 6 });
  const before = await published(publisher);
  expect(before).toEqual([[1], [2], [-3], [4], [5, -6]]);
});

it('many of them go before their time', async () => {
  const publisher = await start(60_000);
  const many = packedOf(Array.from({ length: 10_000 }, (_, i) => i + 1));
  for (let i = 0; i < 11; i++) publisher.publishPacked(many);
  expect(publisher.stats()).toMatchObject({ publishedBatches: 3, publishedEvents: 110_000 });
});

it('without a time each is a batch', async () => {
  const publisher = await start(0);
  for (const hash of [1, 2, 3]) publisher.publishPacked(packedOf([hash]));
  expect(await published(publisher)).toEqual([[1], [2], [3]]);
});

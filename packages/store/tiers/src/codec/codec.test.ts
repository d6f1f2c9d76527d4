/** Encoded objects: exact round trips over real slots, what is saved, and no flipped byte that becomes a wrong block. */

import { native } from '@kvtier/data-plane';
import { decodeHeader, encodeHeader, headerBytes, type Namespace, slotBytesFor } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { until } from '../../../../../infra/redis/servers.ts';
import { ArenaMemory } from '../arena/arena-memory.ts';
import { DiskTier } from '../disk/disk-tier.ts';
import { seededRandom } from '../kit/testing/faulty-tier.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import type { SlotBlock, SlotSizes, Tier, WriteStatus } from '../kit/tier.ts';
import { FakeBucket } from '../s3/testing/fake-bucket.ts';
import { openS3 } from '../s3/testing/s3.ts';
import { CodecChoice, sampleEvery } from './choice.ts';
import { decodeObject, encodeObject, plainHeader } from './codec.ts';
import { CodecTier } from './codec-tier.ts';
import { decodeTable, encodeTable, tableBytes, type Width, widths } from './encoded.ts';

const arenaBytes = 32 << 20;
const space = namespaceNamed('one');
let bench: TestBench;
let memory: ArenaMemory;
beforeEach(() => {
  bench = new TestBench(arenaBytes);
  memory = new ArenaMemory(bench.arena, arenaBytes);
});
afterEach(() => bench.dispose());

/** Normally distributed numbers as bf16: what KV looks like to a codec. */
function bf16Noise(bytes: number, seed: number): Buffer {
  const random = seededRandom(seed);
  const out = Buffer.alloc(bytes);
  const float = Buffer.alloc(4);
  for (let at = 0; at + 2 <= bytes; at += 2) {
    float.writeFloatLE(Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random()));
    float.copy(out, at, 2);
  }
  return out;
}

/** A slot with this payload as a plain object. */
function slotWith(name: string, payload: Buffer): number {
  const slot = bench.emptySlot(payload.length);
  const header = {
    namespace: space.digest,
    hash: hashNamed(name),
    parent: null,
    tokenCount: 16,
    payloadBytes: payload.length,
    payloadChecksum: native.xxh3_64(payload),
  };
  native.arenaWrite(bench.arena, slot, Buffer.concat([encodeHeader(header), payload]));
  return slot;
}

async function encoded(payload: Buffer, width: Width) {
  const source = slotWith('block', payload);
  const target = bench.emptySlot(payload.length);
  const place = { arena: bench.arena, memory };
  const bytes = await encodeObject(place, plainHeader(bench.arena, source)!, source, target, width);
  return { source, target, bytes, place };
}

const headerAt = (slot: number) => {
  const header = decodeHeader(native.arenaRead(bench.arena, slot, headerBytes));
  if ('error' in header) throw new Error(header.error);
  return header;
};

describe('an encoded object', () => {
  it.each(widths)('becomes exactly the object that it was, width %i', async (width) => {
    const lengths = fc.integer({ min: 0, max: 5000 }).map((count) => count * width);
    await fc.assert(
      fc.asyncProperty(lengths, fc.boolean(), fc.nat(), async (bytes, noisy, seed) => {
        const payload = noisy ? bf16Noise(bytes, seed) : Buffer.alloc(bytes, seed % 251);
        const { source, target, bytes: stored, place } = await encoded(payload, width);
        if (stored !== undefined) {
          expect(stored).toBeLessThan(bytes);
          expect(headerAt(target)).toMatchObject({ codec: 1, payloadBytes: stored });
          expect(await decodeObject(place, headerAt(target), target, bench.tier.slotBytesOf(target))).toBe(bytes);
          expect(bench.payloadAt(target, bytes).equals(payload)).toBe(true);
          expect(headerAt(target)).toEqual(headerAt(source));
        } else expect(noisy || bytes <= 120).toBe(true); // of four planes, table and lengths are more than 120 bytes
        for (const slot of [source, target]) bench.tier.free(slot);
      }),
      { numRuns: 40 },
    );
  });

  it('saves on bf16 what its exponents have too many of, and only when they are apart', async () => {
    const payload = bf16Noise(1 << 20, 7);
    const whole = await encoded(payload, 1);
    const apart = await encoded(payload, 2);
    expect(whole.bytes).toBeUndefined();
    expect(apart.bytes! / payload.length).toBeLessThan(0.9);
    expect(apart.bytes! / payload.length).toBeGreaterThan(0.6);
  });

  it('is never decoded into something else, whatever byte is flipped', async () => {
    const payload = bf16Noise(20_000, 3);
    const { target, bytes, place } = await encoded(payload, 2);
    const object = native.arenaRead(bench.arena, target, headerBytes + bytes!);
    const slotBytes = bench.tier.slotBytesOf(target);
    const header = headerAt(target);
    for (let at = 0; at < bytes!; at += at < 64 ? 1 : 41) {
      native.arenaWrite(bench.arena, target, object);
      bench.flip(target + headerBytes + at);
      // A writer's defect: its checksum is that of the damaged bytes, so that only the codec can notice.
      const result = await decodeObject(place, header, target, slotBytes);
      if (typeof result === 'number') expect(bench.payloadAt(target, result).equals(payload), `byte ${at}`).toBe(true);
    }
  });

  it('is refused when it would not fit its slot, or names a codec that nobody knows', async () => {
    const { target, place } = await encoded(Buffer.alloc(50_000, 9), 2);
    expect(await decodeObject(place, headerAt(target), target, 8192)).toBe('too large');
    expect(await decodeObject(place, { ...headerAt(target), codec: 77 }, target, 1 << 20)).toBe('foreign');
  });
});

describe('the table', () => {
  it('has the bytes of docs/formats.md', () => {
    const table = {
      width: 2,
      rawBytes: 2_097_152,
      rawChecksum: 0x0123456789abcdefn,
      planeBytes: [1_048_576, 700_001],
    } as const;
    expect(encodeTable(table).toString('hex')).toBe(
      '0200000000000000' + '0000200000000000' + 'efcdab8967452301' + '0000100000000000' + '61ae0a0000000000',
    );
    expect(decodeTable(encodeTable(table), tableBytes(2) + 1_748_577)).toEqual(table);
  });

  it('is refused when its numbers do not add up', () => {
    const table = { width: 2, rawBytes: 100, rawChecksum: 1n, planeBytes: [50, 20] } as const;
    const bytes = encodeTable(table);
    expect(decodeTable(bytes, tableBytes(2) + 71)).toBeUndefined();
    expect(decodeTable(bytes.subarray(0, 10), tableBytes(2) + 70)).toBeUndefined();
    for (const [at, value] of [
      [0, 3],
      [8, 99],
      [24, 51],
      [15, 0xff],
    ] as const) {
      const wrong = Buffer.from(bytes);
      wrong[at] = value;
      expect(decodeTable(wrong, tableBytes(2) + 70), `byte ${at}`).toBeUndefined();
    }
  });
});

describe('the choice', () => {
  it('tries each width, then takes the better one, and asks again', () => {
    const choice = new CodecChoice([2, 4]);
    expect(choice.next()).toBe(2);
    expect(choice.encoded(2, 1000, 700)).toBe(true);
    expect(choice.next()).toBe(4);
    expect(choice.encoded(4, 1000, 990)).toBe(false);
    const rest = Array.from({ length: 2 * sampleEvery }, () => choice.next());
    expect(rest.filter((width) => width === 4).length).toBe(1);
    expect(rest.filter((width) => width === 2).length).toBe(2 * sampleEvery - 1);
  });

  it('does without where it does not pay, and samples one in 64', () => {
    const choice = new CodecChoice([1]);
    for (let i = 0; i < 3; i++) choice.encoded(choice.next() ?? 1, 1000, 950);
    const rest = Array.from({ length: 10 * sampleEvery }, () => choice.next());
    expect(rest.filter((width) => width !== undefined).length).toBe(10);
  });

  it('does without where the tier is faster than decoding', () => {
    const choice = new CodecChoice([2]);
    choice.next();
    expect(choice.encoded(2, 1000, 700)).toBe(true);
    choice.decoded(1000, 1); // 1 GB/s
    choice.read(1000, 1); // 1 GB/s: saves 0.3 µs, costs 1
    expect(choice.encoded(2, 1000, 700)).toBe(false);
    for (let i = 0; i < 30; i++) choice.read(1000, 10); // 0.1 GB/s: saves 3
    expect(choice.encoded(2, 1000, 700)).toBe(true);
  });
});

it('a tier says what its codec saved, and reads it without one, later', async () => {
  const open = async (codec: 'none' | 'planes+lz4') =>
    new CodecTier({
      inner: await DiskTier.open({
        dir: `${bench.dir}/segments`,
        capacityBytes: 8 << 20,
        arena: bench.arena,
        slots: bench.tier,
        log: silentLog,
        io: { backend: 'threads' },
      }),
      codec,
      arena: bench.arena,
      memory,
      slots: bench.tier,
      nowUs: () => 0,
    });
  const payloads = [1, 2, 3].map((seed) => bf16Noise(200_000, seed));
  const names = payloads.map((_, index) => `noise ${index}`);
  const blocks = payloads.map((payload, index) => ({
    hash: hashNamed(names[index]!),
    slot: slotWith(names[index]!, payload),
  }));
  const tier = await open('planes+lz4');
  expect(await tier.write(space, blocks)).toEqual(['stored', 'stored', 'stored']);
  const { detail } = tier.stats();
  // The first two are encoded as samples of both widths; width 4 has four planes, of which one is worth it, too.
  expect(detail).toMatchObject({ codec_raw_bytes: 600_000, codec_plain_blocks: 0 });
  expect(detail!.codec_saved_bytes).toBe(600_000 - detail!.codec_stored_bytes!);
  expect(detail!.codec_saved_bytes).toBeGreaterThan(60_000);
  const needed = slotBytesFor(200_000); // not what the encoded object takes on disk
  expect(tier.objectBytes(space, blocks[0]!.hash)).toBe(needed);
  expect(tier.objectBytes(space, hashNamed('not held'))).toBeUndefined();
  await tier.close();
  const plain = await open('none');
  expect(plain.objectBytes(space, blocks[0]!.hash)).toBeUndefined(); // another life: not known before it is read
  // It takes no less than what is stored, whatever somebody else believes.
  const stored = plain.objectBytes(space, blocks[0]!.hash, 4096)!;
  expect(stored).toBeGreaterThan(150_000);
  expect([stored + 4096, needed].map((guess) => plain.objectBytes(space, blocks[0]!.hash, guess))).toEqual([
    stored + 4096,
    needed,
  ]);
  // Who asks with slots that hold it as it is stored has not found damage.
  const readSmall = async (names: typeof blocks, sizes?: SlotSizes): Promise<void> => {
    const small = names.map(({ hash }) => ({ hash, slot: bench.emptySlot(195_000) }));
    const answers: string[] = [];
    const ended = (index: number, status: string): void => {
      answers[index] = status;
    };
    await plain.read(space, small, ended, sizes);
    expect(answers).toEqual(names.map(() => 'missing'));
    for (const { slot } of small) bench.tier.free(slot);
  };
  await readSmall(blocks, 'guessed');
  expect(plain.stats()).toMatchObject({ blocks: 3, corrupt: 0 });
  const targets = blocks.map(({ hash }) => ({ hash, slot: bench.emptySlot(200_000) }));
  const statuses: string[] = [];
  await plain.read(space, targets, (index, status) => {
    statuses[index] = status;
  });
  expect(statuses).toEqual(['ready', 'ready', 'ready']);
  for (const [index, { slot }] of targets.entries()) {
    expect(bench.payloadAt(slot, 200_000).equals(payloads[index]!)).toBe(true);
  }
  expect(plain.objectBytes(space, blocks[0]!.hash)).toBe(needed);
  // Where slots are of the size that this node's blocks have, it is one of another mind's, and in the way of the name.
  await readSmall(blocks.slice(1));
  expect(plain.lookup(space, [blocks[0]!.hash])).toBe(1);
  expect(plain.stats()).toMatchObject({ blocks: 1, corrupt: 0 });
  await plain.close();
});

describe('a write of many blocks', () => {
  const hashes = Array.from({ length: 64 }, (_, i) => hashNamed(`of many ${i}`));
  const tierOver = (inner: Tier): CodecTier =>
    new CodecTier({ inner, codec: 'lz4', arena: bench.arena, memory, slots: bench.tier, nowUs: () => 0 });

  it('becomes one pack in a tier that gathers', async () => {
    const bucket = await FakeBucket.start();
    const at = { endpoint: bucket.endpoint, bucket: bucket.name, bytes: 64 << 20, packBytes: 4 << 20, flushMs: 1_000 };
    const inner = await openS3(bench, at);
    const tier = tierOver(inner);
    const { bytes } = bench.tier.stats();
    expect(await bench.write(tier, space, hashes, 16_000)).toEqual(hashes.map(() => 'stored'));
    expect(inner.stats().detail).toMatchObject({ packs: 1 });
    expect(tier.stats().detail!.codec_saved_bytes).toBeGreaterThan(500_000);
    expect(await bench.read(tier, space, hashes, 16_000)).toEqual(hashes.map(() => 'ready'));
    expect(bench.tier.stats().bytes).toBe(bytes);
    await tier.close();
    await bucket.stop();
  });

  /** A tier that keeps nothing; `end` says what becomes of a write, by its number. */
  function innerTier(end: (call: number, blocks: readonly SlotBlock[]) => Promise<WriteStatus[]>): Tier {
    let calls = 0;
    const write = (_: Namespace, blocks: readonly SlotBlock[]) => end(calls++, blocks);
    return { name: 's3', lookup: () => 0, write } as unknown as Tier;
  }

  it('is refused only in part where a part of it is, and keeps no slot', async () => {
    const { bytes } = bench.tier.stats();
    const tier = tierOver(innerTier(async (call, blocks) => blocks.map(() => (call === 1 ? 'refused' : 'stored'))));
    const statuses = await bench.write(tier, space, hashes, 16_000);
    expect(statuses).toEqual(hashes.map((_, i) => (i >= 4 && i < 8 ? 'refused' : 'stored')));
    expect(bench.tier.stats().bytes).toBe(bytes);
  });

  it('that throws in part has ended altogether when it throws, and keeps no slot', async () => {
    const { bytes } = bench.tier.stats();
    const ends: (() => void)[] = [];
    const tier = tierOver(
      innerTier(async (call, blocks) => {
        if (call === 0) throw new Error('a defect');
        await new Promise<void>((resolve) => void ends.push(resolve));
        return blocks.map(() => 'stored');
      }),
    );
    let hasEnded = false;
    const writing = bench.write(tier, space, hashes, 16_000).finally(() => {
      hasEnded = true;
    });
    const thrown = expect(writing).rejects.toThrow('a defect');
    await until(() => ends.length === 15, 'the other parts');
    expect(hasEnded).toBe(false);
    for (const end of ends) end();
    await thrown;
    expect(bench.tier.stats().bytes).toBe(bytes);
  });
});

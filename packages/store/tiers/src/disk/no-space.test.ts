/**
 * A file system that refuses writes into files that are there, as copy-on-write and thin volumes do when they are full: what is
 * held is read on, nothing goes for it, and what was removed stays so. Refusals are injected where calls and completions come from
 * native code; a volume that is really full is in full-disk.slow.test.ts.
 */
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';
import { DeviceRoom } from './file-room.ts';

const payloadBytes = 60_000;
const space = namespaceNamed('no space');
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));
const [writes, enospc] = [2, 28];
const patience = { timeout: 20_000, interval: 10 };
const capacityBytes = 4 << 20;

let bench: TestBench;
let told: string[];
beforeEach(() => {
  bench = new TestBench();
  told = [];
});
afterEach(() => {
  vi.restoreAllMocks();
  bench.dispose();
});

const log = {
  info: () => {},
  warn: (_: object, message: string) => void told.push(message),
  error: (_: object, message: string) => void told.push(message),
};
const open = (backend: 'io_uring' | 'threads' = 'threads'): Promise<DiskTier> =>
  DiskTier.open({
    ...{ dir: join(bench.dir, 'a'), capacityBytes, segmentBytes: 1 << 20, log, io: { backend } },
    ...{ arena: bench.arena, slots: bench.tier, retry: { firstMs: 20, longestMs: 40 } },
    onOutOfService: (reason) => told.push(`OUT: ${reason}`),
  });

/** Writes one after the other until one is stored. */
async function writeUntilStored(tier: DiskTier, prefix: string): Promise<HashKey> {
  let hash: HashKey | undefined;
  let at = 0;
  await vi.waitUntil(async () => {
    hash = hashNamed(`${prefix} ${at++}`);
    return (await bench.write(tier, space, [hash], payloadBytes))[0] === 'stored';
  }, patience);
  return hash!;
}

/** Calls that write into segments end with ENOSPC while it says so. */
function refuseCalls(refuses: () => boolean): { refused: number } {
  const seen = { refused: 0 };
  const original = native.fileWrite;
  vi.spyOn(native, 'fileWrite').mockImplementation((...given) => {
    if (!refuses()) return original.apply(native, given);
    seen.refused++;
    return Promise.reject(Object.assign(new Error(`IO: ${given[1]}: cannot be written`), { errno: enospc }));
  });
  return seen;
}

describe.each(['io_uring', 'threads'] as const)('on %s', (backend) => {
  it('refuses writes and reads on, takes no space for what it tries, and stores again when there is space', async () => {
    const tier = await open(backend);
    const before = names('before', 20);
    for (let from = 0; from < 20; from += 10)
      await bench.write(tier, space, before.slice(from, from + 10), payloadBytes);
    const { blocks } = tier.stats();
    native.ioFault(tier.devices[0]!.io.handle, writes, enospc, false);
    for (let i = 0; i < 200; i++) {
      const statuses = await bench.write(tier, space, names(`during${i}.`, 4), payloadBytes);
      expect(statuses).toEqual(['refused', 'refused', 'refused', 'refused']);
      if (i % 20 === 0) await new Promise((resolve) => setTimeout(resolve, 41)); // a try is due
    }
    expect(told).toEqual([
      'a device of the disk tier has no space left even for writes into its own files: it goes on reading',
    ]);
    const full = tier.stats();
    expect(full).toMatchObject({ inService: true, outOfServiceReason: '', blocks });
    expect(full.detail).toMatchObject({ devices_without_space: 1, outages: 0 });
    expect(await bench.read(tier, space, before, payloadBytes)).toEqual(before.map(() => 'ready'));
    native.ioFault(tier.devices[0]!.io.handle, 0, 0, false);
    const after = await writeUntilStored(tier, 'after');
    expect(told[1]).toBe('a device of the disk tier has space for writes again');
    expect(tier.stats().detail).toMatchObject({ devices_without_space: 0 });
    tier.checkIntegrity();
    await tier.close();
    const again = await open(backend);
    expect(await bench.read(again, space, [...before, after], payloadBytes)).toEqual(
      [...before, after].map(() => 'ready'),
    );
    await again.close();
  });
});

it('without space for a new header no segment goes but the one that was emptied', async () => {
  const tier = await open();
  let round = 0;
  const write = (): Promise<string[]> => bench.write(tier, space, names(`r${round++}.`, 4), payloadBytes);
  while (tier.stats().evictions === 0) expect(await write()).toEqual(['stored', 'stored', 'stored', 'stored']);
  let isFull = true;
  const seen = refuseCalls(() => isFull);
  await vi.waitUntil(async () => (await write()).includes('refused'), patience);
  const { blocks, evictions } = tier.stats();
  for (let i = 0; i < 20; i++) {
    await write();
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  expect(seen.refused).toBeGreaterThan(2);
  expect(tier.stats()).toMatchObject({ inService: true, blocks, evictions });
  isFull = false;
  await writeUntilStored(tier, 'after');
  expect(told.filter((each) => /OUT|out of service/.test(each))).toEqual([]);
  tier.checkIntegrity();
  await tier.close();
});

it('what is removed meanwhile is marked as soon as there is space', async () => {
  const tier = await open();
  const chain = names('chain', 12);
  await bench.write(tier, space, chain, payloadBytes);
  let isFull = true;
  const seen = refuseCalls(() => isFull);
  expect(tier.remove(space, chain.slice(3, 5), 'asked')).toBe(2);
  await vi.waitUntil(() => seen.refused >= 2, patience);
  expect(tier.stats()).toMatchObject({ inService: true, blocks: 10 });
  isFull = false;
  await vi.waitUntil(() => [...tier.devices[0]!.segments].every(({ erased }) => erased.length === 0), patience);
  await tier.close();
  const again = await open();
  const statuses = await bench.read(again, space, chain, payloadBytes);
  expect(statuses).toEqual(chain.map((_, i) => (i === 3 || i === 4 ? 'missing' : 'ready')));
  await again.close();
});

it('what was removed and could not be marked by its end goes with its file', async () => {
  const tier = await open();
  const chain = names('chain', 4);
  await bench.write(tier, space, chain, payloadBytes);
  const { path } = [...tier.devices[0]!.segments].find(({ state }) => state === 'open')!;
  refuseCalls(() => true);
  tier.remove(space, chain.slice(0, 1), 'asked');
  await tier.close();
  expect(existsSync(path)).toBe(false);
  vi.restoreAllMocks();
  const again = await open();
  expect(await bench.read(again, space, chain, payloadBytes)).toEqual(chain.map(() => 'missing'));
  await again.close();
});

it('an emptied segment without space for a new header gives its file back', async () => {
  const tier = await open();
  let round = 0;
  while (![...tier.devices[0]!.segments].some(({ state }) => state === 'sealed'))
    await bench.write(tier, space, names(`r${round++}.`, 4), payloadBytes);
  const sealed = [...tier.devices[0]!.segments].find(({ state }) => state === 'sealed')!;
  refuseCalls(() => true);
  const all = Array.from({ length: round }, (_, i) => names(`r${i}.`, 4)).flat();
  tier.remove(space, all, 'asked');
  await vi.waitUntil(() => ![...tier.devices[0]!.segments].includes(sealed), patience);
  expect(tier.stats()).toMatchObject({ inService: true, blocks: 0 });
  await vi.waitUntil(() => !existsSync(sealed.path), patience);
  tier.checkIntegrity();
  await tier.close();
});

it('the wait doubles up to its longest, also when space ends again soon; what began before it says nothing', () => {
  let nowMs = 0;
  const room = new DeviceRoom('/d', log, { firstMs: 10, longestMs: 40 }, () => nowMs, 'writes');
  const waits: number[] = [];
  for (let i = 0; i < 4; i++) {
    room.told(true);
    room.told(true);
    room.told(false, nowMs - 1);
    waits.push(room.waitMs);
    nowMs += room.waitMs;
  }
  expect(waits).toEqual([10, 20, 40, 40]);
  expect(room).toMatchObject({ isFull: true, isLikely: true });
  room.told(false);
  expect(room).toMatchObject({ isFull: false, isLikely: true, waitMs: 0 });
  nowMs += 40;
  room.told(true);
  expect(room.waitMs).toBe(40);
  room.freed();
  expect(room).toMatchObject({ isFull: true, isLikely: true });
  room.told(false);
  nowMs += 41;
  room.told(true);
  expect(room.waitMs).toBe(10);
  expect(told).toHaveLength(5);
});

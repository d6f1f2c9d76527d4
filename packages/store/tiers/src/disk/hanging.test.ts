/**
 * Calls to a file system that hang: for real, in open(2) of a pipe without another end in the place of a segment. Only what that
 * device holds goes; nothing else of the process waits for it.
 */
import { execFileSync, spawn } from 'node:child_process';
import { lookup } from 'node:dns/promises';
import { once } from 'node:events';
import { closeSync, constants, openSync, renameSync, rmSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { native } from '@kvtier/data-plane';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { identitiesOf } from './disk-io.ts';
import { DiskTier } from './disk-tier.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('hanging');
const patience = { timeout: 40_000, interval: 5 };
/** A device that is well answers sooner, on a machine that is busy with other things, too. */
const hangsMs = 3_000;
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));

let bench: TestBench;
beforeEach(() => {
  bench = new TestBench();
});
afterEach(() => bench.dispose());

const open = (dirs: readonly string[], timeoutMs: number): Promise<DiskTier> =>
  DiskTier.open({
    dirs: dirs.map((dir) => join(bench.dir, dir)),
    ...{ capacityBytes: dirs.length * (4 << 20), segmentBytes: 256 << 10, timeoutMs, io: { backend: 'threads' } },
    ...{ arena: bench.arena, slots: bench.tier, log: silentLog, retry: { firstMs: 20, longestMs: 100 } },
  });

/** A pipe in the place of the segment of this number: to open it for writing waits for a reader. */
function block(dir: string, id: number): { release: () => void } {
  const path = join(bench.dir, dir, `segment-0000000${id}.kvs`);
  renameSync(path, `${path}-kept`);
  execFileSync('mkfifo', [path]);
  return {
    // In one turn: the device that is tried again meanwhile must not find the pipe.
    release: () => {
      const reader = openSync(path, constants.O_RDONLY | constants.O_NONBLOCK);
      rmSync(path);
      renameSync(`${path}-kept`, path);
      closeSync(reader);
    },
  };
}

/** Blocks of which some go, on every device. */
const all = Array.from({ length: 40 }, (_, round) => names(`${round}.`, 40)).flat();
const gone = all.filter((_, i) => i % 5 < 2);

/** A tier of which each device has written the first segment full. */
async function filled(dirs: readonly string[], timeoutMs: number): Promise<DiskTier> {
  const tier = await open(dirs, timeoutMs);
  const isFull = (): boolean =>
    tier.devices.every(({ segments }) => [...segments].some(({ id, hasFooter }) => id === 1 && hasFooter));
  for (let from = 0; !isFull(); from += 40)
    await Promise.all(all.slice(from, from + 40).map((hash) => bench.write(tier, space, [hash], payloadBytes)));
  return tier;
}

it('devices that hang in their file systems take only what they hold; verification, names and files go on', async () => {
  const dirs = ['a', 'b', 'c', 'd', 'e', 'well'];
  const tier = await filled(dirs, hangsMs);
  const pipes = dirs.slice(0, 5).map((dir) => block(dir, 1));
  const before = tier.stats().blocks;
  // Marks are to be written, and there the call hangs.
  expect(tier.remove(space, gone, 'asked')).toBeGreaterThan(5);
  await vi.waitUntil(() => tier.devices.slice(0, 5).every(({ inService }) => !inService), patience);
  for (const { reason } of tier.devices.slice(0, 5)) expect(reason).toMatch(/the device did not answer for 3000 ms/);
  expect(tier.devices[5]!.inService).toBe(true);
  expect(tier.stats()).toMatchObject({ inService: true, corrupt: 0 });
  expect(tier.stats().blocks).toBeLessThan(before);

  // Five calls hang: more than libuv has threads.
  const hanging = (): number[] => tier.devices.slice(0, 5).map(({ files }) => files.openCount);
  expect(hanging()).toEqual([1, 1, 1, 1, 1]);
  const slot = bench.filledSlot(space, hashNamed('sound'), payloadBytes);
  const identity = identitiesOf(space, [hashNamed('sound')]);
  const bytes = Float64Array.of(256 + payloadBytes);
  expect([...(await native.arenaVerify(bench.arena, Float64Array.of(slot), bytes, identity))]).toEqual([0]);
  bench.tier.free(slot);
  expect((await lookup('localhost')).family).toBeGreaterThan(0);
  await readFile('/proc/self/stat');
  for (let i = 0; i < 6; i++) {
    const more = names(`more ${i}.`, 20); // makes segments on the device that is well
    expect(await bench.write(tier, space, more, payloadBytes)).toEqual(more.map(() => 'stored'));
    expect(await bench.read(tier, space, more, payloadBytes)).toEqual(more.map(() => 'ready'));
  }
  expect(hanging()).toEqual([1, 1, 1, 1, 1]); // still: nothing of that has waited for them
  expect(tier.devices[5]!.inService).toBe(true);

  for (const pipe of pipes) pipe.release();
  await vi.waitUntil(() => tier.devices.every(({ inService }) => inService), patience);
  // What was removed did not come back with them.
  expect(gone.filter((hash) => tier.lookup(space, [hash]) === 1)).toEqual([]);
  tier.checkIntegrity();
  await tier.close();
  const again = await open(dirs, 10_000);
  expect(gone.filter((hash) => again.lookup(space, [hash]) === 1)).toEqual([]);
  expect(again.stats().blocks).toBeGreaterThan(0);
  await again.close();
}, 90_000);

it('what was all removed when the device hung is gone when it is back, and its space is used', async () => {
  const tier = await filled(['a'], hangsMs);
  const first = [...tier.devices[0]!.segments].find(({ id }) => id === 1)!;
  const held = all.filter((hash) => tier.lookup(space, [hash]) === 1);
  const pipe = block('a', 1);
  tier.remove(space, held, 'asked');
  await vi.waitUntil(() => !tier.stats().inService, patience);
  expect(first.erased.length).toBeGreaterThan(0);
  pipe.release();
  await vi.waitUntil(() => tier.stats().inService, patience);
  expect(tier.stats()).toMatchObject({ blocks: 0, corrupt: 0 });
  await vi.waitUntil(() => [...tier.devices[0]!.segments].every(({ erased }) => erased.length === 0), patience);
  for (let i = 0; i < 20; i++) {
    const more = names(`more ${i}.`, 20);
    expect(await bench.write(tier, space, more, payloadBytes)).toEqual(more.map(() => 'stored'));
  }
  tier.checkIntegrity();
  await tier.close();
});

it('closes, and frees its lock, although a call hangs', async () => {
  const tier = await filled(['a'], hangsMs);
  const pipe = block('a', 1);
  tier.remove(space, gone, 'asked');
  await vi.waitUntil(() => tier.devices[0]!.files.openCount > 0, patience);
  const { files } = tier.devices[0]!;
  await tier.close();
  expect(files.openCount).toBe(1); // it hangs still
  pipe.release();
  const again = await open(['a'], 10_000);
  expect(again.stats().blocks).toBeGreaterThan(0);
  await again.close();
});

it('a pipe in the place of a segment is none at the start, and nothing hangs', async () => {
  const tier = await filled(['a'], 10_000);
  await tier.close();
  const checkpoint = join(bench.dir, 'a', 'checkpoint.kvc');
  rmSync(checkpoint);
  const link = join(bench.dir, 'a', 'segment-00000001.kvs');
  renameSync(link, `${link}-kept`);
  execFileSync('mkfifo', [link]);
  // A pipe is no segment: it is not opened.
  const again = await open(['a'], 10_000);
  expect(again.stats().inService).toBe(true);
  await again.close();
});

it('begins without a device that hangs at the start, and has it when that goes on', async () => {
  const tier = await filled(['a', 'b'], 10_000);
  const blocks = tier.stats().blocks;
  const held = all.filter((hash) => tier.lookup(space, [hash]) === 1);
  await tier.close();
  rmSync(join(bench.dir, 'a', 'checkpoint.kvc')); // what lies in segments is to be read
  // Whoever opens a file of which another process has the lease waits for it in open(2).
  const take = `import fcntl, signal, sys
signal.signal(signal.SIGIO, signal.SIG_IGN)
file = open(sys.argv[1], 'r+b')
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print('taken', flush=True)
signal.pause()`;
  const holder = spawn('/usr/bin/python3', ['-c', take, join(bench.dir, 'a', 'segment-00000001.kvs')], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let again: DiskTier;
  try {
    await once(holder.stdout, 'data');
    again = await open(['a', 'b'], hangsMs);
    expect(again.devices.map(({ reason }) => reason)).toEqual([
      expect.stringMatching(/a: the device did not answer for 3000 ms$/),
      '',
    ]);
    const there = held.filter((hash) => again.lookup(space, [hash]) === 1);
    expect(there.length).toBe(again.stats().blocks);
    expect(there.length).toBeGreaterThan(0);
    expect(there.length).toBeLessThan(blocks);
    const more = names('more', 4);
    expect(await bench.write(again, space, more, payloadBytes)).toEqual(more.map(() => 'stored'));
  } finally {
    holder.kill();
    await once(holder, 'close');
  }
  await vi.waitUntil(() => again.devices.every(({ reason }) => reason === ''), patience);
  expect(again.stats()).toMatchObject({ inService: true, blocks: blocks + 4 });
  again.checkIntegrity();
  await again.close();
});

it('a standstill of its own process is not the fault of a device', async () => {
  const tier = await open(['a'], 2_000);
  const chain = names('still', 4);
  await bench.write(tier, space, chain, payloadBytes);
  for (let i = 0; i < 2; i++) {
    const slots = chain.map((hash) => ({ hash, slot: bench.emptySlot(payloadBytes) }));
    const statuses: string[] = [];
    await sleep(1); // from here on in a timer: others that are due come before anything that the device has ended
    const reading = tier.read(space, slots, (index, status) => {
      statuses[index] = status;
    });
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 5_000);
    await reading;
    expect(statuses).toEqual(['ready', 'ready', 'ready', 'ready']);
    for (const { slot } of slots) bench.tier.free(slot);
  }
  expect(tier.stats()).toMatchObject({ inService: true, blocks: 4 });
  await tier.close();
});

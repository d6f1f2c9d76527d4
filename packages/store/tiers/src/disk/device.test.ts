/**
 * Devices that break and come back, without a restart: EIO and a device that does not answer, one of several devices, blocks
 * that the segments are too small for. Faults are injected where the native queue hands completions over
 * (`native.ioFault`); all behind it is the real path. A full file system is in full-disk.slow.test.ts.
 */
import { existsSync, readdirSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { native } from '@kvtier/data-plane';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { slicing } from '../kit/slices.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import type { TierChange } from '../kit/tier.ts';
import type { DiskDevice } from './device.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskTierOptions } from './options.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('device');
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));
const reads = 1;
const writes = 2;
const eio = 5;
const patience = { timeout: 20_000, interval: 10 };

let bench: TestBench;
beforeEach(() => {
  bench = new TestBench();
});
afterEach(() => bench.dispose());

const open = (options: Partial<DiskTierOptions> = {}): Promise<DiskTier> =>
  DiskTier.open({
    ...{ dir: join(bench.dir, 'a'), capacityBytes: 4 << 20, arena: bench.arena, slots: bench.tier, log: silentLog },
    ...{ retry: { firstMs: 20, longestMs: 100 } },
    ...options,
  });
const two = (): Pick<DiskTierOptions, 'dirs' | 'capacityBytes'> => ({
  dirs: [join(bench.dir, 'a'), join(bench.dir, 'b')],
  capacityBytes: 8 << 20,
});

/** What followers are told, folded into what is held. */
function following(tier: DiskTier): { held: Set<HashKey>; cleared: number } {
  const seen = { held: new Set<HashKey>(), cleared: 0 };
  tier.follow((change: TierChange) => {
    if (change.kind === 'cleared') {
      seen.cleared++;
      seen.held.clear();
    }
    for (const hash of change.hashes) {
      if (change.kind === 'stored') seen.held.add(hash);
      else expect(seen.held.delete(hash)).toBe(true);
    }
  });
  return seen;
}

describe.each(['io_uring', 'threads'] as const)('on %s', (backend) => {
  it('comes back after EIO on writes, with what was stored before', async () => {
    const reasons: string[] = [];
    const tier = await open({ io: { backend }, onOutOfService: (reason) => reasons.push(reason) });
    const seen = following(tier);
    const chain = names('before', 20);
    await bench.write(tier, space, chain, payloadBytes);
    native.ioFault(tier.devices[0]!.io.handle, writes, eio, false);
    expect(await bench.write(tier, space, names('during', 1), payloadBytes)).toEqual(['refused']);
    expect(reasons).toHaveLength(1);
    expect(reasons[0]).toMatch(/a write failed \(errno 5\)/);
    expect(tier.stats()).toMatchObject({ inService: false, outOfServiceReason: reasons[0], blocks: 0 });
    expect(seen).toEqual({ held: new Set(), cleared: 1 });
    expect(tier.lookup(space, chain)).toBe(0);
    native.ioFault(tier.devices[0]!.io.handle, 0, 0, false);
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(tier.lookup(space, chain)).toBe(20);
    for (const hash of chain) expect(seen.held).toContain(hash);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    expect(await bench.write(tier, space, names('after', 3), payloadBytes)).toEqual(['stored', 'stored', 'stored']);
    expect(seen.held.size).toBe(tier.stats().blocks);
    tier.checkIntegrity();
    await tier.close();
  });

  it('keeps what lies before the failed write in a segment that was just full', async () => {
    const tier = await open({ io: { backend } });
    const chain = names('before', 20);
    await bench.write(tier, space, chain, payloadBytes);
    native.ioFault(tier.devices[0]!.io.handle, writes, eio, false);
    const during = await bench.write(tier, space, names('during', 60), payloadBytes); // more than its segment holds
    expect(during).toEqual(during.map(() => 'refused'));
    native.ioFault(tier.devices[0]!.io.handle, 0, 0, false);
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    await tier.close();
  });

  it('does not list again what it could not read', async () => {
    const tier = await open({ io: { backend } });
    const chain = names('bad', 10);
    await bench.write(tier, space, chain, payloadBytes);
    native.ioFault(tier.devices[0]!.io.handle, reads, eio, false);
    expect(await bench.read(tier, space, chain.slice(4, 5), payloadBytes)).toEqual(['failed']);
    native.ioFault(tier.devices[0]!.io.handle, 0, 0, false);
    await vi.waitUntil(() => tier.stats().inService, patience);
    const statuses = await bench.read(tier, space, chain, payloadBytes);
    expect(statuses).toEqual(chain.map((_, i) => (i === 4 ? 'missing' : 'ready')));
    tier.checkIntegrity();
    await tier.close();
  });

  it('ends what a hanging device does not, keeps its slots out of use, and comes back when it answers', async () => {
    const tier = await open({ io: { backend }, timeoutMs: 2_500 });
    const chain = names('hang', 4);
    await bench.write(tier, space, chain, payloadBytes);
    const { handle } = tier.devices[0]!.io;
    native.ioFault(handle, reads | writes, 0, true);
    const slot = bench.emptySlot(payloadBytes);
    const statuses: string[] = [];
    await tier.read(space, [{ hash: chain[0]!, slot }], (_, status) => statuses.push(status));
    expect(statuses).toEqual(['failed']);
    expect(tier.stats()).toMatchObject({ inService: false });
    expect(tier.stats().outOfServiceReason).toMatch(/did not answer in time/);
    bench.tier.free(slot);
    bench.tier.checkIntegrity();
    const taken = takeAll();
    expect(taken).not.toContain(slot); // the device may still write there
    native.ioFault(handle, 0, 0, false);
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(takeAll()).toContain(slot);
    for (const each of [...taken, slot]) bench.tier.free(each);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    await tier.close();
    bench.tier.checkIntegrity();
  });

  it('closes although a device hangs', async () => {
    const tier = await open({ io: { backend }, timeoutMs: 1_500 });
    native.ioFault(tier.devices[0]!.io.handle, writes, 0, true);
    expect(await bench.write(tier, space, names('never', 2), payloadBytes)).toEqual(['refused', 'refused']);
    await tier.close();
    const again = await open({ io: { backend } }); // the lock is free
    await again.close();
  });
});

/** Every slot of this size that the arena has left. */
function takeAll(): number[] {
  const slots: number[] = [];
  for (;;) {
    const slot = bench.tier.allocate(space, payloadBytes);
    if (slot === undefined) return slots;
    slots.push(slot);
  }
}

it('a folder that is removed before its node ends, or while it does, is no trouble; another node’s is left as it is', async () => {
  const lines: string[] = [];
  const told = (_: object, line: string): void => void lines.push(line);
  const log = { info: () => {}, warn: told, error: told };
  const dir = join(bench.dir, 'a');
  const remove = (): void => rmSync(dir, { recursive: true });
  const filled = async (onStep?: DiskTierOptions['onStep']): Promise<DiskTier> => {
    const tier = await open({ log, ...(onStep && { onStep }) });
    await bench.write(tier, space, names('before', 4), payloadBytes);
    return tier;
  };
  const before = await filled();
  remove();
  await before.close();
  const during = await filled((step) => step === 'disk.close.checkpoint' && remove());
  await during.close();
  expect(existsSync(dir)).toBe(false);
  const first = await filled();
  remove();
  const other = await open();
  await first.close();
  // (A file that was just being made there fails the device, which is told.)
  expect([existsSync(join(dir, 'checkpoint.kvc')), lines.filter((line) => line.includes('checkpoint'))]).toEqual([
    false,
    [],
  ]);
  await other.close();
  expect(existsSync(join(dir, 'checkpoint.kvc'))).toBe(true);
});

it('a folder that was removed, and is another node’s by now, is left alone until that one has gone', async () => {
  const reasons: string[] = [];
  const log = { ...silentLog, warn: ({ reason }: { reason?: string }) => void reasons.push(reason ?? '') };
  const tier = await open({ log });
  await bench.write(tier, space, names('before', 4), payloadBytes);
  // It would make its next file in the other one's folder.
  await vi.waitUntil(() => readdirSync(join(bench.dir, 'a')).includes('segment-00000002.kvs'), patience);
  rmSync(join(bench.dir, 'a'), { recursive: true });
  const other = await open();
  const chain = names('theirs', 20);
  await bench.write(other, space, chain, payloadBytes);
  native.ioFault(tier.devices[0]!.io.handle, writes, eio, false);
  await bench.write(tier, space, names('during', 1), payloadBytes);
  native.ioFault(tier.devices[0]!.io.handle, 0, 0, false);
  await vi.waitUntil(() => reasons.filter((reason) => /another node|locked|held/i.test(reason)).length > 1, patience);
  expect(tier.stats().inService).toBe(false);
  expect(await bench.read(other, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
  await other.close();
  await vi.waitUntil(() => tier.stats().inService, patience);
  expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
  await expect(open()).rejects.toThrow(expect.objectContaining({ code: 'LOCKED' }));
  tier.checkIntegrity();
  await tier.close();
});

it('a folder that was removed, and is nobody’s, is made anew: its device is back without what it held', async () => {
  const outages: string[] = [];
  const tier = await open({ onOutOfService: (reason) => void outages.push(reason) });
  const seen = following(tier);
  await bench.write(tier, space, names('before', 4), payloadBytes);
  rmSync(join(bench.dir, 'a'), { recursive: true });
  // Until its next file cannot be made.
  for (let i = 0; outages.length === 0; i++) await bench.write(tier, space, names(`until ${i}.`, 20), payloadBytes);
  await vi.waitUntil(() => tier.stats().inService, patience);
  expect([outages.length, seen.held.size]).toEqual([1, 0]);
  const chain = names('after', 4);
  expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
  expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
  await expect(open()).rejects.toThrow(expect.objectContaining({ code: 'LOCKED' }));
  tier.checkIntegrity();
  await tier.close();
  const again = await open();
  expect(again.stats().blocks).toBe(4);
  await again.close();
});

it.each(['nobody’s', 'another node’s'])(
  'what could not be read in a folder that was removed says nothing of %s in its place',
  async (whose) => {
    const tier = await open();
    const [device] = tier.devices;
    const [bad, sound] = names('first ', 2) as [HashKey, HashKey];
    await bench.write(tier, space, [bad], payloadBytes);
    // Its next file would be made in the other one's folder.
    await vi.waitUntil(() => [...device!.segments].length === 2, patience);
    const [segment] = [...device!.segments].filter(({ listedCount }) => listedCount > 0);
    const place = { id: segment!.id, generation: segment!.generation };
    rmSync(device!.dir, { recursive: true });
    const other = whose === 'nobody’s' ? undefined : await open();
    native.ioFault(device!.io.handle, reads, eio, false);
    expect(await bench.read(tier, space, [bad], payloadBytes)).toEqual(['failed']);
    native.ioFault(device!.io.handle, 0, 0, false);
    if (other !== undefined) await bench.write(other, space, [sound], payloadBytes);
    await other?.close();
    await vi.waitUntil(() => device!.inService, patience);
    if (other === undefined) await bench.write(tier, space, [sound], payloadBytes);
    expect([...device!.segments].find(({ listedCount }) => listedCount > 0)).toMatchObject(place);
    device!.fail(new Error('gone'));
    await vi.waitUntil(() => device!.inService, patience);
    expect(await bench.read(tier, space, [sound], payloadBytes)).toEqual(['ready']);
    await tier.close();
  },
);

it('can be read at every moment from the end of its listing on', async () => {
  const readable: boolean[] = [];
  let device: DiskDevice | undefined;
  // After the last step of the listing, one microtask after the other until the device is in service.
  const look = (): void => {
    readable.push(device!.canRead);
    if (!device!.inService && readable.length < 1000) queueMicrotask(look);
  };
  const info = (_: object, line: string): void => {
    if (device !== undefined && line.includes('is open')) look();
  };
  const tier = await open({ log: { ...silentLog, info } });
  await bench.write(tier, space, names('held', 4), payloadBytes);
  [device] = tier.devices;
  device!.fail(new Error('gone'));
  await vi.waitUntil(() => device!.inService, patience);
  expect(readable.length).toBeGreaterThan(1);
  expect(readable).toEqual(readable.map(() => true));
  await tier.close();
});

it('what counts as held while its device comes back can be read', async () => {
  const tier = await open();
  const seen = following(tier);
  const chain = names('restored', 200);
  await bench.write(tier, space, chain, payloadBytes);
  const device = tier.devices[0]!;
  device.fail(new Error('gone'));
  let early = 0;
  while (!device.inService) {
    await nextTurn();
    const held = chain.filter((hash) => tier.lookup(space, [hash]) === 1).slice(0, 20);
    if (device.inService || held.length === 0) continue;
    early += held.length;
    expect(await bench.read(tier, space, held, payloadBytes)).toEqual(held.map(() => 'ready'));
  }
  expect(early).toBeGreaterThan(0);
  expect([tier.lookup(space, chain), seen.held.size]).toEqual([200, 200]);
  expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
  tier.checkIntegrity();
  await tier.close();
});

it('a read that fails while its device comes back keeps it out of service for another try', async () => {
  const reasons: string[] = [];
  const log = { ...silentLog, warn: ({ reason }: { reason?: string }) => void reasons.push(reason ?? '') };
  const tier = await open({ log });
  // A try before may have found that the device still hangs.
  const isTold = (): boolean => reasons.some((reason) => reason.includes('a read failed'));
  const chain = names('restored', 200);
  await bench.write(tier, space, chain, payloadBytes);
  const device = tier.devices[0]!;
  device.fail(new Error('gone'));
  let bad: HashKey | undefined;
  while (!device.inService) {
    await nextTurn();
    bad ??= device.canRead ? chain.find((hash) => tier.lookup(space, [hash]) === 1) : undefined;
    if (bad === undefined || isTold()) continue;
    const segment = [...device.segments].find(({ listedCount }) => listedCount > 0)!;
    device.fail(new Error(`${segment.path}: a read failed`));
  }
  expect(isTold()).toBe(true);
  expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
  tier.checkIntegrity();
  await tier.close();
});

describe('several devices', () => {
  it('stripes blocks over them, and one that breaks takes only its part', async () => {
    const tier = await open(two());
    const seen = following(tier);
    const chain = names('striped', 64);
    for (let from = 0; from < 64; from += 8) {
      const slice = chain.slice(from, from + 8);
      await Promise.all(slice.map((hash) => bench.write(tier, space, [hash], payloadBytes)));
    }
    expect(tier.stats()).toMatchObject({ blocks: 64, capacityBytes: 8 << 20 });
    native.ioFault(tier.devices[1]!.io.handle, writes, eio, false);
    for (let i = 0; tier.devices[1]!.inService && i < 50; i++) {
      await Promise.all(names(`x${i}.`, 4).map((hash) => bench.write(tier, space, [hash], payloadBytes)));
    }
    expect(tier.stats()).toMatchObject({ inService: true, detail: { devices: 2, devices_out_of_service: 1 } });
    const left = chain.filter((hash) => tier.lookup(space, [hash]) === 1);
    expect(left.length).toBeGreaterThan(10);
    expect(left.length).toBeLessThan(54);
    expect(seen.cleared).toBe(0);
    expect(seen.held.size).toBe(tier.stats().blocks);
    expect(await bench.write(tier, space, names('one', 4), payloadBytes)).toEqual(names('one', 4).map(() => 'stored'));
    native.ioFault(tier.devices[1]!.io.handle, 0, 0, false);
    await vi.waitUntil(() => tier.stats().detail!.devices_out_of_service === 0, patience);
    expect(tier.lookup(space, chain)).toBe(64);
    expect(seen.held.size).toBe(tier.stats().blocks);
    tier.checkIntegrity();
    await tier.close();
    const again = await open(two());
    expect(again.lookup(space, chain)).toBe(64);
    expect(await bench.read(again, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    await again.close();
  });

  it('refuses budgets and folders that cannot be', async () => {
    const dir = join(bench.dir, 'a');
    const refused = { code: 'CONFIG' };
    await expect(open({ dirs: [dir, dir] })).rejects.toMatchObject(refused);
    await expect(open({ dirs: [{ dir, capacityBytes: 5 << 20 }] })).rejects.toMatchObject(refused);
    await expect(open({ dirs: [{ dir, capacityBytes: 4 << 20 }, join(bench.dir, 'b')] })).rejects.toMatchObject(
      refused,
    );
    const tier = await open(); // no lock was left behind
    await tier.close();
  });
});

describe('what a device held is dropped in slices', () => {
  const { blocks } = slicing;
  beforeEach(() => {
    slicing.blocks = 4;
  });
  afterEach(() => {
    slicing.blocks = blocks;
  });

  it('what was not dropped yet is missing when it is read, and can be written', async () => {
    const tier = await open(two());
    const seen = following(tier);
    const chain = names('striped', 64);
    await Promise.all(chain.map((hash) => bench.write(tier, space, [hash], payloadBytes)));
    const lost = tier.devices[1]!;
    const away = join(bench.dir, 'away'); // there its folder, with a file in its place, keeps it out for as long as this looks
    const take = (): void => {
      renameSync(lost.dir, away);
      writeFileSync(lost.dir, '');
    };
    const giveBack = (): void => {
      rmSync(lost.dir);
      renameSync(away, lost.dir);
    };
    take();
    lost.fail(new Error('gone'));
    const found = await bench.read(tier, space, chain, payloadBytes);
    const failed = new Set(chain.filter((_, i) => found[i] !== 'ready'));
    expect(failed.size).toBeGreaterThan(8);
    expect(found.filter((status) => status === 'missing')).toHaveLength(failed.size);
    for (const hash of failed) expect(tier.lookup(space, [hash])).toBe(0);
    expect(seen).toEqual({ cleared: 0, held: new Set(chain.filter((hash) => !failed.has(hash))) });
    giveBack();
    await vi.waitUntil(() => lost.inService, patience);
    expect(seen).toEqual({ cleared: 0, held: new Set(chain) });
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    take();
    lost.fail(new Error('gone again'));
    const again = await bench.write(tier, space, [...failed], payloadBytes);
    expect(again).toEqual([...failed].map(() => 'stored'));
    expect(await bench.read(tier, space, [...failed], payloadBytes)).toEqual(again.map(() => 'ready'));
    giveBack();
    await vi.waitUntil(() => lost.inService, patience);
    expect(seen).toEqual({ cleared: 0, held: new Set(chain) });
    tier.checkIntegrity();
    await tier.close();
  });

  it('of the last one in one word: nothing is listed from then on, however long the drop takes', async () => {
    const tier = await open();
    const seen = following(tier);
    const chain = names('all', 40);
    await bench.write(tier, space, chain, payloadBytes);
    tier.devices[0]!.fail(new Error('gone'));
    expect(seen).toEqual({ cleared: 1, held: new Set() });
    expect([tier.stats().blocks, tier.lookup(space, chain), tier.remove(space, chain, 'asked')]).toEqual([0, 0, 0]);
    expect(following(tier).held.size).toBe(0);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'missing'));
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(seen).toEqual({ cleared: 1, held: new Set(chain) });
    tier.checkIntegrity();
    await tier.close();
  });
});

describe('sizes and recency', () => {
  it('holds blocks that its default segments are too small for, as long as its capacity allows', async () => {
    const tier = await open();
    expect(await bench.write(tier, space, names('small', 8), payloadBytes)).toEqual(
      names('small', 8).map(() => 'stored'),
    );
    const large = 1_500_000;
    for (const hash of names('large', 6)) expect(await bench.write(tier, space, [hash], large)).toEqual(['stored']);
    expect(await bench.read(tier, space, [hashNamed('large5')], large)).toEqual(['ready']);
    expect(await bench.write(tier, space, [hashNamed('too large')], (2 << 20) - headerBytes)).toEqual(['refused']);
    expect(tier.stats().bytes).toBeLessThanOrEqual(4 << 20);
    tier.checkIntegrity();
    await tier.close();
    const again = await open();
    expect(await bench.read(again, space, [hashNamed('large5')], large)).toEqual(['ready']);
    await again.close();
  });

  it.each(['lru', 'fifo', 'lfu', 's3-fifo'] as const)(
    'keeps the order of eviction over a restart: %s',
    async (policy) => {
      const options = { policy, segmentBytes: 128 << 10, capacityBytes: 2 << 20 };
      let tier = await open(options);
      const chain = names('order', 90); // 10 to a segment
      await bench.write(tier, space, chain, payloadBytes);
      tier.touch(space, chain.slice(0, 10)); // the oldest segment becomes the most recent
      await tier.close();
      const evicted: HashKey[] = [];
      tier = await open({ ...options, onEvict: (_, hash) => evicted.push(hash) });
      for (let i = 0; evicted.length < 20; i++) await bench.write(tier, space, names(`new ${i}.`, 9), payloadBytes);
      if (policy === 'lru') expect(evicted.slice(0, 10)).toEqual(chain.slice(10, 20));
      if (policy === 'fifo') expect(chain.slice(0, 10)).toContain(evicted[0]);
      tier.checkIntegrity();
      await tier.close();
    },
  );

  it('writes recency down as it goes: a crash does not lose it', async () => {
    const tier = await open({ checkpointMs: 1 });
    await bench.write(tier, space, names('periodic', 4), payloadBytes);
    await vi.waitUntil(() => readdirSync(join(bench.dir, 'a')).includes('checkpoint.kvc'), patience);
    await tier.close();
  });
});

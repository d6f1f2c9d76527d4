/**
 * What is removed stays away: from a device that was out of service meanwhile, from a restart, and where several devices have copies of
 * it, one of which was stored while another one was out.
 */
import { renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { native } from '@kvtier/data-plane';
import { decodeHeader, type HashKey, headerBytes } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { slicing } from '../kit/slices.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import type { DiskDevice } from './device.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskTierOptions } from './options.ts';
import { maxRemovedMeanwhile, RemovedMeanwhile } from './removed-meanwhile.ts';
import type { Segment } from './segment.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('removals');
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));
const [reads, writes] = [1, 2];
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
/** Stores others until `hash`, which is stored on that device, is carried over there: `begun` is called as its write begins. */
async function carryOver(tier: DiskTier, device: DiskDevice, hash: HashKey, begun: () => void): Promise<void> {
  tier.touch(space, [hash]);
  const { io } = device;
  const write = io.write.bind(io);
  let isBegun = false;
  vi.spyOn(io, 'write').mockImplementation((rows, generations) => {
    const headers = rows.map(({ slot }) => decodeHeader(native.arenaRead(bench.arena, slot, headerBytes)));
    if (!isBegun && headers.some((header) => !('error' in header) && header.hash === hash)) {
      isBegun = true;
      begun();
    }
    write(rows, generations);
  });
  for (let i = 0; !isBegun; i++) await bench.write(tier, space, names(`over ${i}.`, 1), payloadBytes);
  await vi.waitUntil(() => [...device.segments].every(({ state }) => state !== 'leaving'), patience);
}

async function outage(device: DiskDevice): Promise<void> {
  device.fail(new Error('gone'));
  await vi.waitUntil(() => device.inService, patience);
}

const two = (): Pick<DiskTierOptions, 'dirs' | 'capacityBytes'> => ({
  dirs: [join(bench.dir, 'a'), join(bench.dir, 'b')],
  capacityBytes: 8 << 20,
});

describe('what is removed while its device is out of service', () => {
  it.each(['dropped', 'listed again'])(
    'stays away, where it was being %s: from the device that is back, and from a restart',
    async (when) => {
      const tier = await open(two());
      const chain = names('removed', 200);
      for (let from = 0; from < 200; from += 8)
        await bench.write(tier, space, chain.slice(from, from + 8), payloadBytes);
      const device = tier.devices[0]!;
      const gone = new Set<HashKey>();
      const isHeld = (hash: HashKey): boolean => tier.lookup(space, [hash]) === 1;
      const remove = (hash: HashKey): void => {
        expect(tier.remove(space, [hash], 'asked')).toBe(1);
        gone.add(hash);
      };
      const { blocks } = slicing;
      slicing.blocks = 16;
      try {
        device.fail(new Error('gone'));
        if (when === 'dropped') for (const hash of chain.filter(isHeld).filter((_, at) => at % 3 === 0)) remove(hash);
      } finally {
        slicing.blocks = blocks;
      }
      while (!device.inService) {
        await nextTurn();
        if (when === 'dropped' || device.inService || !device.canRead || gone.size > 30) continue;
        for (const hash of chain.filter(isHeld).slice(0, 3)) remove(hash);
      }
      expect(gone.size).toBeGreaterThan(0);
      const left = chain.filter((hash) => !gone.has(hash));
      expect(chain.filter(isHeld)).toEqual(left);
      tier.checkIntegrity();
      await tier.close();
      const again = await open(two());
      expect(chain.filter((hash) => again.lookup(space, [hash]) === 1)).toEqual(left);
      expect(await bench.read(again, space, left, payloadBytes)).toEqual(left.map(() => 'ready'));
      await again.close();
    },
  );

  it('beyond that bound still stays away if it was listed again by then', async () => {
    const tier = await open();
    const chain = names('removed', 200);
    await bench.write(tier, space, chain, payloadBytes);
    const [device] = tier.devices;
    const former = Object.assign(Object.create(null), { id: 1, generation: 1e6, state: 'sealed' });
    device!.fail(new Error('gone'));
    for (let page = 0; page < maxRemovedMeanwhile; page++) device!.erase(former, page, 1);
    let gone: HashKey | undefined;
    while (!device!.inService) {
      await nextTurn();
      if (gone !== undefined || device!.inService || !device!.canRead) continue;
      gone = chain.find((hash) => tier.lookup(space, [hash]) === 1);
      if (gone !== undefined) tier.remove(space, [gone], 'asked');
    }
    expect(chain).toContain(gone); // one was listed in time
    await tier.close();
    const again = await open();
    expect(chain.filter((hash) => again.lookup(space, [hash]) === 0)).toEqual([gone]);
    await again.close();
  });

  it('is remembered up to a bound, beyond which it is said, once', async () => {
    const lines: string[] = [];
    const log = { ...silentLog, warn: (_: object, line: string) => void lines.push(line) };
    const tier = await open({ log, retry: { firstMs: 60_000, longestMs: 60_000 } });
    await bench.write(tier, space, names('few', 2), payloadBytes);
    const [device] = tier.devices;
    const [segment] = device!.segments;
    device!.fail(new Error('gone'));
    for (let page = 0; page < maxRemovedMeanwhile + 10; page++) device!.erase(segment!, page, 1);
    expect(lines.filter((line) => line.includes('may come back'))).toHaveLength(1);
    await tier.close();
  });
});

it('what is removed while it is carried over stays away: after an outage of its device, and after a restart', async () => {
  const tier = await open();
  const [carried] = names('carried', 1) as [HashKey];
  await bench.write(tier, space, [carried], payloadBytes);
  const [device] = tier.devices;
  await carryOver(tier, device!, carried, () => expect(tier.remove(space, [carried], 'asked')).toBe(1));
  await outage(device!);
  expect(tier.lookup(space, [carried])).toBe(0);
  tier.checkIntegrity();
  await tier.close();
  const again = await open();
  expect(again.lookup(space, [carried])).toBe(0);
  await again.close();
});

it.each([
  ['sealed', 'one device'],
  // There is nothing behind it in its segment, then or later: it is stored anew on the other device.
  ['open', 'two devices'],
] as const)(
  'what could not be read once, in a segment that was %s, of %s, does not come back when it was stored anew and removed',
  async (where, devices) => {
    const folders = devices === 'two devices' ? two() : {};
    const tier = await open(folders);
    const [before, bad] = names('read ', 2) as [HashKey, HashKey];
    const [other, device = other] = tier.devices as [DiskDevice, DiskDevice?];
    const isBack = (): Promise<boolean> => vi.waitUntil(() => device.inService && other.inService, patience);
    if (other !== device) other.fail(new Error('gone'));
    await bench.write(tier, space, [before, bad], payloadBytes);
    await isBack();
    const segment = [...device.segments].find(({ listedCount }) => listedCount === 2)!;
    for (let i = 0; where === 'sealed' && !segment.hasFooter; i++)
      await bench.write(tier, space, names(`more ${i}.`, 1), payloadBytes);
    native.ioFault(device.io.handle, reads, eio, false);
    expect(await bench.read(tier, space, [bad], payloadBytes)).toEqual(['failed']);
    native.ioFault(device.io.handle, 0, 0, false);
    await isBack();
    expect([tier.lookup(space, [bad]), tier.lookup(space, [before])]).toEqual([0, 1]);
    expect(await bench.write(tier, space, [bad], payloadBytes)).toEqual(['stored']);
    expect(tier.remove(space, [bad], 'asked')).toBe(1);
    await tier.close();
    const again = await open(folders);
    expect([again.lookup(space, [bad]), again.lookup(space, [before])]).toEqual([0, 1]);
    again.checkIntegrity();
    await again.close();
  },
);

it('names and places are remembered up to one bound, a name once; another time out of service begins with none', () => {
  const full = vi.fn();
  const removed = new RemovedMeanwhile(full);
  const segment = Object.assign(Object.create(null), { id: 1, generation: 1, state: 'sealed' });
  removed.begin(undefined);
  for (let page = 0; page < 10; page++) removed.addPlace(segment, page, 1, false);
  const left = maxRemovedMeanwhile - 10;
  for (let i = 0; i < left; i++) removed.addName(space, String(i) as HashKey);
  expect(full).toHaveBeenCalledOnce();
  for (let i = 0; i < left + 10; i++) removed.addName(space, String(i) as HashKey);
  removed.addPlace(segment, 10, 1, false);
  expect([removed.names.size, removed.places.get('1:1')?.length]).toEqual([left, 20]);
  expect(full).toHaveBeenCalledOnce();
  removed.end(Object.create(null)); // nothing was listed, so that it is asked for nothing
  removed.begin(undefined);
  expect([removed.names.size, removed.places.size]).toEqual([0, 0]);
  removed.addName(space, 'again' as HashKey);
  expect(removed.names.size).toBe(1);
});

describe('what lies on two devices, as it was stored again while the first one was out of service,', () => {
  const [copied] = names('copied', 1) as [HashKey];
  let tier: DiskTier;
  let first: DiskDevice;
  let fillers: number;
  beforeEach(async () => {
    fillers = 0;
    tier = await open(two());
    first = await storeSealed();
    // A file in the place of its folder keeps it out.
    renameSync(first.dir, `${first.dir}-away`);
    writeFileSync(first.dir, '');
    first.fail(new Error('gone'));
    expect(await storeSealed()).not.toBe(first);
  });

  /** Stores it, and others until a footer names it; returns the device that has it. */
  async function storeSealed(): Promise<DiskDevice> {
    expect(await bench.write(tier, space, [copied], payloadBytes)).toEqual(['stored']);
    const isOpen = ({ state, listedCount }: Segment): boolean => state === 'open' && listedCount === 1;
    const device = tier.devices.find(({ inService, segments }) => inService && [...segments].some(isOpen))!;
    const segment = [...device.segments].find(isOpen)!;
    while (segment.state === 'open') await bench.write(tier, space, names(`filler ${fillers++}.`, 1), payloadBytes);
    await vi.waitUntil(() => segment.hasFooter, patience);
    return device;
  }

  const giveBack = (): void => {
    rmSync(first.dir);
    renameSync(`${first.dir}-away`, first.dir);
  };
  const isBack = (): Promise<boolean> => vi.waitUntil(() => first.inService, patience);
  const remove = (): void => expect(tier.remove(space, [copied], 'asked')).toBe(1);

  /** Neither copy is listed, now and after a restart. */
  async function expectGone(): Promise<void> {
    expect(tier.lookup(space, [copied])).toBe(0);
    tier.checkIntegrity();
    await tier.close();
    const again = await open(two());
    expect(again.lookup(space, [copied])).toBe(0);
    again.checkIntegrity();
    await again.close();
  }

  it('does not come back with that one when it was removed before', async () => {
    remove();
    giveBack();
    await isBack();
    await expectGone();
  });

  it('comes from there if it was removed, and is stored anew before that one is back', async () => {
    remove();
    expect(await bench.write(tier, space, [copied], payloadBytes)).toEqual(['stored']);
    giveBack();
    await isBack();
    expect(await bench.read(tier, space, [copied], payloadBytes)).toEqual(['ready']);
    await tier.close();
    const again = await open(two());
    expect(await bench.read(again, space, [copied], payloadBytes)).toEqual(['ready']);
    await again.close();
  });

  it('does not come back after a restart when it was removed once that one was back', async () => {
    giveBack();
    await isBack();
    expect(await bench.read(tier, space, [copied], payloadBytes)).toEqual(['ready']);
    remove();
    await expectGone();
  });

  it('does not come back from where it was being carried over to when that one came back', async () => {
    const second = tier.devices.find((device) => device !== first)!;
    await carryOver(tier, second, copied, () => {
      native.ioFault(second.io.handle, writes, 0, true); // its write does not end before this does
      giveBack();
      void isBack().then(() => native.ioFault(second.io.handle, 0, 0, false));
    });
    expect(first.inService).toBe(true);
    remove();
    await outage(second);
    await expectGone();
  });

  it('does not come back after a restart when it was removed after another one, which found both', async () => {
    await tier.close();
    giveBack();
    tier = await open(two());
    expect(await bench.read(tier, space, [copied], payloadBytes)).toEqual(['ready']);
    remove();
    await expectGone();
  });
});

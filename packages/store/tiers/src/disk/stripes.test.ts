/** Over which devices of the disk tier writes are spread: with the real tier, one write after another; and under load. */
import { join } from 'node:path';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import type { WriteJob } from './appender.ts';
import { DiskTier } from './disk-tier.ts';
import { type StripedDevice, Stripes, stripeBytes } from './stripes.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('stripes');
const names = (prefix: string, count: number): HashKey[] =>
  Array.from({ length: count }, (_, i) => hashNamed(`${prefix}${i}`));

describe('one write after another', () => {
  let bench: TestBench;
  beforeEach(() => {
    bench = new TestBench();
  });
  afterEach(() => bench.dispose());

  const open = (...mebibytes: number[]): Promise<DiskTier> =>
    DiskTier.open({
      dirs: mebibytes.map((size, at) => ({ dir: join(bench.dir, `device ${at}`), capacityBytes: size << 20 })),
      capacityBytes: mebibytes.reduce((sum, size) => sum + (size << 20), 0),
      segmentBytes: 256 << 10,
      ...{ arena: bench.arena, slots: bench.tier, log: silentLog, io: { backend: 'threads' } },
    });
  const write = async (tier: DiskTier, hashes: readonly HashKey[]): Promise<void> => {
    for (const hash of hashes) expect(await bench.write(tier, space, [hash], payloadBytes)).toEqual(['stored']);
  };
  const listed = (tier: DiskTier): number[] =>
    tier.devices.map(({ segments }) => [...segments].reduce((sum, { listedCount }) => sum + listedCount, 0));

  it.each([
    { sizes: [4, 4], expected: [50, 50] },
    { sizes: [2, 8], expected: [20, 80] },
    { sizes: [8, 2, 2], expected: [68, 16, 16] },
  ])('goes to devices of $sizes MiB by their budgets, though none of them has anything to do', async (given) => {
    const tier = await open(...given.sizes);
    await write(tier, names('even', 100));
    const found = listed(tier);
    for (const [at, count] of given.expected.entries()) expect(Math.abs(found[at]! - count)).toBeLessThanOrEqual(2);
    await tier.close();
  });

  it('all devices turn over at one rate: what was written last is held without a hole, up to nearly all that they hold', async () => {
    const tier = await open(2, 6);
    const chain = names('turn', 1_000);
    await write(tier, chain);
    const held = chain.toReversed().findIndex((hash) => tier.lookup(space, [hash]) === 0);
    const most = (7 + 23) * 15; // segments beside the metadata, and blocks of each
    expect(held).toBeGreaterThan(most * 0.9);
    await tier.close();
  });

  it('an empty device beside a full one is filled before anything goes from that one', async () => {
    const alone = await open(2);
    const old = names('old', 300);
    await write(alone, old);
    const held = old.filter((hash) => alone.lookup(space, [hash]) === 1);
    await alone.close();
    const tier = await open(2, 2);
    expect(listed(tier)).toEqual([held.length, 0]);
    await write(tier, names('new', Math.floor(held.length * 0.8)));
    expect(listed(tier)).toEqual([held.length, Math.floor(held.length * 0.8)]);
    expect(tier.stats().evictions).toBe(0);
    await tier.close();
  });
});

describe('under load', () => {
  const gib = 1 << 30;
  const job = {} as WriteJob;
  interface FakeDevice extends StripedDevice {
    inService: boolean;
    appender: {
      pendingBytes: number;
      hasRoom: (bytes: number) => boolean;
      append: (jobs: readonly WriteJob[]) => void;
    };
    segments: { state: 'sealed'; tail: number }[];
  }
  const device = (number: number, capacityBytes: number, heldBytes = 0): FakeDevice => {
    const made: FakeDevice = {
      ...{ number, capacityBytes, inService: true },
      segments: [{ state: 'sealed', tail: heldBytes }],
      accepts: () => made.inService,
      appender: {
        pendingBytes: 0,
        hasRoom: (bytes) => made.appender.pendingBytes + bytes <= 256 << 20,
        append: () => {},
      },
    };
    return made;
  };
  /** Stripes that each device gets of `count`, in batches of so many. */
  const spread = (stripes: Stripes, devices: readonly FakeDevice[], count: number, batchStripes = 1): number[] => {
    const given = devices.map(() => 0);
    for (const one of devices) one.appender.append = (jobs) => (given[one.number]! += jobs.length);
    for (let left = count; left > 0; left -= batchStripes) {
      const batch = stripes.batch();
      for (let at = 0; at < batchStripes; at++) batch.jobsFor(stripeBytes)?.push(job);
      batch.submit();
    }
    return given;
  };

  it('a batch goes to all of them, by their budgets', () => {
    const devices = [device(0, gib), device(1, 3 * gib)];
    expect(spread(new Stripes(devices), devices, 16, 4)).toEqual([4, 12]);
  });

  it('a device that has much more to do than another is passed over, and gets what it missed when it has caught up', () => {
    const devices = [device(0, gib), device(1, gib)];
    const stripes = new Stripes(devices);
    devices[0]!.appender.pendingBytes = 8 * stripeBytes;
    expect(spread(stripes, devices, 10)).toEqual([5, 5]);
    devices[0]!.appender.pendingBytes++;
    expect(spread(stripes, devices, 10)).toEqual([0, 10]);
    devices[0]!.appender.pendingBytes = 0;
    expect(spread(stripes, devices, 20)).toEqual([15, 5]);
  });

  it('of what a slow device missed no more than its budget is made up for', () => {
    const devices = [device(0, gib), device(1, gib)];
    const stripes = new Stripes(devices);
    const turn = gib / stripeBytes;
    devices[0]!.appender.pendingBytes = gib;
    expect(spread(stripes, devices, 3 * turn)).toEqual([0, 3 * turn]);
    devices[0]!.appender.pendingBytes = 0;
    expect(spread(stripes, devices, 3 * turn)).toEqual([2 * turn, turn]);
  });

  it('what a device missed while it was out of service is not made up for, but for what it does not hold any more', () => {
    const devices = [device(0, gib, gib), device(1, gib, gib)];
    const stripes = new Stripes(devices);
    const turn = gib / stripeBytes;
    devices[0]!.inService = false;
    expect(spread(stripes, devices, 5 * turn)).toEqual([0, 5 * turn]);
    devices[0]!.inService = true;
    stripes.back(devices[0]!);
    expect(spread(stripes, devices, 10)).toEqual([5, 5]);
    devices[0]!.segments = [{ state: 'sealed', tail: gib / 2 }];
    stripes.back(devices[0]!);
    expect(spread(stripes, devices, turn / 2)).toEqual([turn / 2, 0]);
    expect(spread(stripes, devices, 10)).toEqual([5, 5]);
  });

  it('what no device takes goes nowhere', () => {
    const devices = [device(0, gib), device(1, gib)];
    const stripes = new Stripes(devices);
    for (const one of devices) one.appender.pendingBytes = 256 << 20;
    expect(stripes.batch().jobsFor(1)).toBeUndefined();
    devices[1]!.appender.pendingBytes = 0;
    expect(spread(stripes, devices, 4, 2)).toEqual([0, 4]);
  });
});

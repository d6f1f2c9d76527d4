/**
 * A full device whose segments are smaller than those that are wanted now: of so many of them the space is used anew that one of the new
 * size fits, and the device stays in service meanwhile.
 */
import { join } from 'node:path';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskTierOptions } from './options.ts';

const space = namespaceNamed('small');
const other = namespaceNamed('large');
const smallBytes = 12_000;

let bench: TestBench;
beforeEach(() => {
  bench = new TestBench();
});
afterEach(() => bench.dispose());

const open = (options: Partial<DiskTierOptions>): Promise<DiskTier> =>
  DiskTier.open({
    ...{ dir: join(bench.dir, 'a'), capacityBytes: 4 << 20, arena: bench.arena, slots: bench.tier, log: silentLog },
    ...options,
  });

async function fill(tier: DiskTier): Promise<void> {
  for (let i = 0; tier.stats().evictions === 0; i++) {
    const names = Array.from({ length: 20 }, (_, at) => hashNamed(`${i}.${at}`));
    await bench.write(tier, space, names, smallBytes);
  }
}

/** Each of them is stored, and the tier never goes out of service. */
async function storesAll(tier: DiskTier, payloadBytes: number): Promise<void> {
  let last: HashKey | undefined;
  for (let i = 0; i < 12; i++) {
    last = hashNamed(`large ${i}`);
    expect(await bench.write(tier, other, [last], payloadBytes)).toEqual(['stored']);
    expect(tier.stats()).toMatchObject({ inService: true, detail: { outages: 0 } });
  }
  expect(await bench.read(tier, other, [last!], payloadBytes)).toEqual(['ready']);
  tier.checkIntegrity();
}

it('a block that no segment of a full device can hold', async () => {
  const tier = await open({});
  await fill(tier);
  await storesAll(tier, 1_500_000);
  await tier.close();
});

it('segments four times as large, on a device that is full of the former ones', async () => {
  const capacityBytes = 8 << 20;
  const before = await open({ capacityBytes, segmentBytes: 512 << 10 });
  await fill(before);
  await before.close();
  const tier = await open({ capacityBytes, segmentBytes: 2 << 20 });
  await storesAll(tier, 400_000);
  await tier.close();
});

/** How the tier opens, goes on and ends, whatever one of its packs, or its server, does. */
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { until } from '../../../../../infra/redis/servers.ts';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import type { S3Tier } from './s3-tier.ts';
import { FakeBucket } from './testing/fake-bucket.ts';
import { openS3 } from './testing/s3.ts';

const payloadBytes = 2_000;
const space = namespaceNamed('one');
const packsBelow = 'kvtier/v1/packs/';
const limits = { timeLimitMs: 1_500, idleLimitMs: 500, refreshMs: 20 };

let bench: TestBench;
let bucket: FakeBucket;
let tiers: S3Tier[];
beforeEach(async () => {
  bench = new TestBench();
  bucket = await FakeBucket.start();
  tiers = [];
});
afterEach(async () => {
  bucket.fault = () => undefined;
  for (const tier of tiers) {
    tier.checkIntegrity();
    await tier.close();
  }
  await bucket.stop();
  bench.dispose();
});

async function open(settings: object = {}): Promise<S3Tier> {
  const tier = await openS3(bench, { endpoint: bucket.endpoint, bucket: bucket.name, ...limits, ...settings });
  tiers.push(tier);
  return tier;
}

/** Blocks that another node wrote, a pack for each. */
async function written(count: number): Promise<HashKey[]> {
  const writer = await open({ refreshMs: 3_600_000 });
  const hashes = Array.from({ length: count }, (_, i) => hashNamed(i));
  for (const hash of hashes) expect(await bench.write(writer, space, [hash], payloadBytes)).toEqual(['stored']);
  await writer.close();
  tiers = [];
  return hashes;
}

const heldOf = (tier: S3Tier, hashes: readonly HashKey[]): number =>
  hashes.filter((hash) => tier.lookup(space, [hash]) === 1).length;
const listings = (): number => bucket.requests.filter((request) => request === 'GET ').length;
/** Of packs, in the order in which they were written. */
const packKeys = (): string[] => [...bucket.objects.keys()].filter((key) => key.startsWith(packsBelow));
/** A part of a pack. */
const isTable = ({ method, key }: { method: string; key: string }): boolean =>
  method === 'GET' && key.startsWith(packsBelow);

it('opens without a single table, and finds what the packs hold when these come', async () => {
  const hashes = await written(20);
  let release: () => void = () => {};
  const tables = new Promise<void>((resolve) => {
    release = resolve;
  });
  bucket.fault = (request) => (isTable(request) ? tables : undefined);
  const tier = await open({ timeLimitMs: 10_000, idleLimitMs: 5_000 });
  expect(tier.stats()).toMatchObject({ inService: true, blocks: 0 });
  expect(await bench.write(tier, space, [hashNamed('new')], payloadBytes)).toEqual(['stored']);
  release();
  await until(() => heldOf(tier, hashes) === 20, 'what the packs hold');
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'ready'));
});

it('reads the tables of a bucket for longer than any one request may take', async () => {
  const hashes = await written(32);
  bucket.fault = (request) => (isTable(request) ? new Promise((resolve) => setTimeout(resolve, 150)) : undefined);
  // Four rounds of eight.
  const tier = await open({ timeLimitMs: 400, idleLimitMs: 400, refreshMs: 3_600_000 });
  await until(() => heldOf(tier, hashes) === 32, 'what the packs hold');
});

it('does not wait for a listing for ever', async () => {
  const hashes = await written(2);
  let asked = 0;
  let release: () => void = () => {};
  const answer = new Promise<void>((resolve) => {
    release = resolve;
  });
  // The check lists twice.
  bucket.fault = ({ key }) => (key === '' && ++asked > 2 ? answer : undefined);
  const tier = await open({ timeLimitMs: 1_000, idleLimitMs: 30_000 });
  expect(tier.stats()).toMatchObject({ inService: true, blocks: 0 });
  expect(await bench.write(tier, space, [hashNamed('new')], payloadBytes)).toEqual(['refused']);
  release();
  bucket.fault = () => undefined;
  await until(() => heldOf(tier, hashes) === 2, 'what the packs hold');
});

it('a server that fails after the check is tried again later', async () => {
  let asked = 0;
  bucket.fault = ({ key }) => (key === '' && ++asked > 2 ? 503 : undefined);
  await expect(open()).rejects.toMatchObject({ code: 'IO', retry: true });
});

it.each([
  ['403', 1],
  ['403', 20],
  ['500', 1],
  ['silence', 1],
] as const)('packs whose tables bring %s (%i of them) cost nothing but themselves', async (what, count) => {
  const hashes = await written(count + 10);
  const bad = new Set(packKeys().slice(0, count));
  let asked = 0;
  const fault = { '403': 403, '500': 500, silence: new Promise(() => {}) }[what];
  bucket.fault = (request) => {
    if (!isTable(request) || !bad.has(request.key)) return undefined;
    asked++;
    return fault;
  };
  const tier = await open({ timeLimitMs: 800, idleLimitMs: 200 });
  await until(() => tier.stats().detail!.unreadable_packs === count, 'that they are left alone');
  expect([heldOf(tier, hashes), tier.stats().inService]).toEqual([10, true]);
  const [askedBefore, listingsBefore] = [asked, listings()];
  await until(() => listings() >= listingsBefore + 3, 'more listings');
  expect(asked).toBe(askedBefore);
  // An outage, and back.
  const faultBefore = bucket.fault;
  bucket.fault = () => 500;
  await until(() => !tier.stats().inService, 'the outage');
  bucket.fault = faultBefore;
  await until(() => tier.stats().inService && heldOf(tier, hashes) === 10, 'service');
  // Whoever mends them need not start anything anew.
  bucket.fault = () => undefined;
  await until(() => heldOf(tier, hashes) === count + 10, 'what was mended');
  expect(tier.stats().detail!.unreadable_packs).toBe(0);
});

it('one pack that cannot be read any more takes nothing else out of service', async () => {
  const hashes = await written(2);
  const tier = await open({ refreshMs: 3_600_000 });
  await until(() => heldOf(tier, hashes) === 2, 'what the packs hold');
  bucket.fault = (request) => (isTable(request) && request.key === packKeys()[0]! ? 500 : undefined);
  for (let i = 0; i < 3; i++) await bench.read(tier, space, hashes.slice(0, 1), payloadBytes);
  await bench.read(tier, space, hashes.slice(1), payloadBytes);
  expect(tier.stats().inService).toBe(true);
});

it.each([
  ['a listing', () => ''],
  ['a table', () => packKeys()[0]!],
])('its end does not wait for %s that does not come', async (_, keyNow) => {
  await written(3);
  const silent = keyNow();
  let isOpen = false;
  let isAsked = false;
  bucket.fault = ({ key }) => {
    if (key !== silent || (key === '' && !isOpen)) return undefined;
    isAsked = true;
    return new Promise(() => {});
  };
  const tier = await open({ timeLimitMs: 30_000, idleLimitMs: 30_000 });
  isOpen = true;
  await until(() => isAsked, 'the silence');
  const startMs = performance.now();
  await tier.close();
  expect(performance.now() - startMs).toBeLessThan(2_000);
});

it('its end does not wait for reads and writes of a silent server', async () => {
  const hashes = await written(3);
  const tier = await open({ timeLimitMs: 30_000, idleLimitMs: 30_000 });
  await until(() => tier.stats().blocks === 3, 'what the packs hold');
  bucket.fault = () => new Promise(() => {});
  const reading = bench.read(tier, space, hashes, payloadBytes);
  const writing = bench.write(tier, space, [hashNamed('new')], payloadBytes);
  const startMs = performance.now();
  await tier.close();
  expect(performance.now() - startMs).toBeLessThan(4_000);
  expect(await reading).toEqual(hashes.map(() => 'failed'));
  expect(await writing).toEqual(['refused']);
});

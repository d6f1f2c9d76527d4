/** How the tier opens, goes on and ends, whatever one of its packs, or its server, does. */
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { until } from '../../../../../infra/redis/servers.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import type { S3Tier } from './s3-tier.ts';
import { FakeBucket } from './testing/fake-bucket.ts';
import { openS3 } from './testing/s3.ts';

const payloadBytes = 2_000;
const space = namespaceNamed('one');
const packsBelow = 'kvtier/v1/packs/';
// Shorter where silence is the point: the server is in this process, and stands still with it.
const limits = { timeLimitMs: 20_000, idleLimitMs: 10_000, refreshMs: 20 };

let bench: TestBench;
let bucket: FakeBucket;
let tiers: S3Tier[];
beforeEach(async () => {
  bench = new TestBench();
  bucket = await FakeBucket.start();
  tiers = [];
  vi.spyOn(Math, 'random').mockReturnValue(0); // no wait is longer than it must be
});
afterEach(async () => {
  bucket.fault = () => undefined;
  for (const tier of tiers) {
    tier.checkIntegrity();
    await tier.close();
  }
  await bucket.stop();
  bench.dispose();
  vi.restoreAllMocks();
});

async function open(settings: object = {}, options: object = {}): Promise<S3Tier> {
  const at = { endpoint: bucket.endpoint, bucket: bucket.name };
  const tier = await openS3(bench, { ...at, ...limits, ...settings }, options);
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
  const tier = await open();
  expect(tier.stats()).toMatchObject({ inService: true, blocks: 0 });
  expect(await bench.write(tier, space, [hashNamed('new')], payloadBytes)).toEqual(['stored']);
  release();
  await until(() => heldOf(tier, hashes) === 20, 'what the packs hold');
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'ready'));
});

it('reads the tables of a bucket for longer than any one request may take', async () => {
  const hashes = await written(32);
  bucket.fault = (request) => (isTable(request) ? new Promise((resolve) => setTimeout(resolve, 500)) : undefined);
  // Four rounds of eight.
  const tier = await open({ timeLimitMs: 1_750, idleLimitMs: 1_750, refreshMs: 3_600_000 });
  await until(() => heldOf(tier, hashes) === 32, 'what the packs hold');
});

it('does not wait for a listing for ever', async () => {
  const hashes = await written(2);
  let asked = 0;
  let release: () => void = () => {};
  const answer = new Promise<void>((resolve) => {
    release = resolve;
  });
  // The check lists once, where the settings are there.
  bucket.fault = ({ key }) => (key === '' && ++asked > 1 ? answer : undefined);
  const tier = await open({ timeLimitMs: 1_500, idleLimitMs: 30_000 });
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

it('a server that is silent is tried again later, and no word is said of credentials', async () => {
  bucket.fault = () => new Promise(() => {});
  const silence = await open({ timeLimitMs: 600, idleLimitMs: 500 }).catch((error: unknown) => error);
  expect(silence).toMatchObject({ code: 'IO', retry: true, message: expect.stringContaining('does not answer') });
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
  const tier = await open(what === 'silence' ? { timeLimitMs: 1_500, idleLimitMs: 1_000 } : {});
  const isLeftAlone = (): boolean => tier.stats().detail!.unreadable_packs === count;
  await until(() => isLeftAlone() && heldOf(tier, hashes) === 10, 'that they alone are left alone');
  expect(tier.stats().inService).toBe(true);
  if (what === '403') {
    const [askedBefore, listingsBefore] = [asked, listings()];
    await until(() => listings() >= listingsBefore + 3, 'more listings');
    expect(asked).toBe(askedBefore);
  } // of the others, time may mend them: discovery.test.ts
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

it('is back soon after its server, however many tables were left to read', async () => {
  const count = 40;
  const hashes = await written(count);
  let [tables, isDown, tablesBefore] = [0, false, 0];
  // A few are known; the next ones hang until their requests are given up, when the server is being asked whether it is back.
  bucket.fault = (request) => {
    if (isDown) return 500;
    if (request.key === '' && tables >= 18) tablesBefore ||= tables;
    if (!isTable(request) || ++tables <= 10) return undefined;
    return tables <= 18 ? new Promise(() => {}) : new Promise((resolve) => setTimeout(resolve, 100));
  };
  const tier = await open({ idleLimitMs: 1_500, timeLimitMs: 20_000 });
  await until(() => tables >= 18, 'tables that hang');
  isDown = true;
  const known = hashes.filter((hash) => heldOf(tier, [hash]) === 1);
  const reading = bench.read(tier, space, known, payloadBytes);
  await until(() => !tier.stats().inService, 'the outage');
  isDown = false;
  await until(() => tier.stats().inService, 'service');
  expect(tablesBefore).toBeLessThan(count); // at its first listing: the rest of them was not waited for
  await reading;
  expect(tier.stats().detail!.unreadable_packs).toBe(0);
  await until(() => heldOf(tier, hashes) === count, 'what the packs hold');
});

it('says so when a pass ends early by a defect, and begins another', async () => {
  const hashes = await written(3);
  const lines: object[] = [];
  const log = { ...silentLog, error: (fields: object) => void lines.push(fields) };
  let release: () => void = () => {};
  const tablesCome = new Promise<void>((resolve) => {
    release = resolve;
  });
  bucket.fault = (request) => (isTable(request) ? tablesCome : undefined);
  const tier = await open({}, { log });
  const end = tier.follow(() => {
    throw new Error('a broken follower');
  });
  release();
  await until(() => lines.length > 0, 'a word of it');
  expect(lines).toEqual([{ tier: 's3', reason: 'a broken follower' }]);
  end();
  await until(() => heldOf(tier, hashes) === 3, 'another pass');
});

it('one pack that cannot be read any more takes nothing else out of service', async () => {
  const hashes = await written(2);
  const tier = await open({ refreshMs: 3_600_000 });
  await until(() => heldOf(tier, hashes) === 2, 'what the packs hold');
  bucket.fault = (request) => (isTable(request) && request.key === packKeys()[0]! ? 500 : undefined);
  for (let i = 0; i < 3; i++) await bench.read(tier, space, hashes.slice(0, 1), payloadBytes);
  expect(await bench.read(tier, space, hashes.slice(1), payloadBytes)).toEqual(['ready']);
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
  expect(performance.now() - startMs).toBeLessThan(10_000);
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
  expect(performance.now() - startMs).toBeLessThan(10_000);
  expect(await reading).toEqual(hashes.map(() => 'failed'));
  expect(await writing).toEqual(['refused']);
});

/** A tier that knows the packs of three blocks, and the key of the first, which other blocks do not share. */
async function known(settings: object = {}): Promise<{ tier: S3Tier; hashes: HashKey[]; key: string }> {
  const hashes = await written(3);
  const tier = await open({ refreshMs: 3_600_000, ...settings });
  await until(() => heldOf(tier, hashes) === 3, 'what the packs hold');
  return { tier, hashes, key: packKeys()[0]! };
}

it.each([
  ['is refused (403)', 403],
  ['does not come as it was (a 206 of another length)', 'short'],
] as const)('a known pack that %s is left alone with its blocks, and looked at again later', async (_, what) => {
  const { tier, hashes, key } = await known({ refreshMs: 50 });
  const others = hashes.slice(1);
  const whole = bucket.objects.get(key)!;
  if (what === 'short') bucket.objects.set(key, { ...whole, body: whole.body.subarray(0, -1) });
  let asked = 0;
  bucket.fault = (request) => {
    if (!isTable(request) || request.key !== key) return undefined;
    asked++;
    return what === 'short' ? undefined : what;
  };
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['failed', 'ready', 'ready']);
  expect([heldOf(tier, hashes), asked, tier.stats().detail!.unreadable_packs]).toEqual([3, 1, 0]);
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['missing', 'ready', 'ready']);
  expect([heldOf(tier, hashes), asked, tier.stats().detail!.unreadable_packs]).toEqual([2, 2, 1]);
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['missing', 'ready', 'ready']);
  const listingsBefore = listings();
  await until(() => listings() >= listingsBefore + 3, 'more listings');
  expect([asked, heldOf(tier, others), tier.stats().inService]).toEqual([2, 2, true]);
  bucket.fault = () => undefined;
  bucket.objects.set(key, whole);
  await until(() => heldOf(tier, hashes) === 3, 'what was mended');
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['ready', 'ready', 'ready']);
  expect(tier.stats().detail!.unreadable_packs).toBe(0);
});

it('one bad reply, or several at one time, hide no pack; nor do bad ones with good ones between', async () => {
  const { tier, hashes, key } = await known();
  const read = () => bench.read(tier, space, hashes, payloadBytes);
  for (let round = 0; round < 3; round++) {
    let asked = 0;
    let refuse: (status: number) => void = () => {};
    const both = new Promise<number>((resolve) => {
      refuse = resolve;
    });
    // Neither is answered before both are asked.
    bucket.fault = (request) => {
      if (!isTable(request) || request.key !== key) return undefined;
      if (++asked === 2) refuse(403);
      return both;
    };
    const failed = ['failed', 'ready', 'ready'];
    expect(await Promise.all([read(), read()])).toEqual([failed, failed]);
    bucket.fault = () => undefined;
    expect(await read()).toEqual(['ready', 'ready', 'ready']);
  }
  expect(heldOf(tier, hashes)).toBe(3);
});

it('a known pack that is gone (404) is a miss for good', async () => {
  const { tier, hashes, key } = await known({ refreshMs: 20 });
  // Also where the listing names it still.
  bucket.fault = (request) => (isTable(request) && request.key === key ? 404 : undefined);
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['missing', 'ready', 'ready']);
  expect(heldOf(tier, hashes)).toBe(2);
  const listingsBefore = listings();
  await until(() => listings() >= listingsBefore + 3, 'more listings');
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['missing', 'ready', 'ready']);
  expect([heldOf(tier, hashes), tier.stats().inService]).toEqual([2, true]);
});

it('a known pack that is damaged throughout is corrupt once, and goes', async () => {
  const { tier, hashes, key } = await known();
  const { etag, body } = bucket.objects.get(key)!;
  bucket.objects.set(key, { etag, body: Buffer.alloc(body.length, 1) });
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['corrupt', 'ready', 'ready']);
  expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(['missing', 'ready', 'ready']);
  expect(tier.stats()).toMatchObject({ corrupt: 1, blocks: 2 });
  await until(() => !bucket.objects.has(key), 'its end');
});

it('an empty pack that may not be deleted is left alone, and one line says so of all', async () => {
  const hashes = await written(3);
  const lines: object[] = [];
  const log = { ...silentLog, warn: (fields: object, message: string) => void lines.push({ ...fields, message }) };
  const tier = await open({ refreshMs: 50 }, { log });
  await until(() => heldOf(tier, hashes) === 3, 'what the packs hold');
  const deletes = (): number => bucket.requests.filter((request) => request.startsWith(`DELETE ${packsBelow}`)).length;
  const before = deletes();
  bucket.fault = ({ method }) => (method === 'DELETE' ? 403 : undefined);
  expect(tier.remove(space, hashes.slice(0, 2), 'asked')).toBe(2);
  await until(() => tier.stats().detail!.unreadable_packs === 2, 'what is left alone');
  const listingsBefore = listings();
  await until(() => listings() >= listingsBefore + 4, 'more listings');
  expect([deletes() - before, heldOf(tier, hashes), packKeys().length]).toEqual([2, 1, 3]);
  const message = 's3: packs that cannot be deleted are left alone for a while';
  expect(lines).toEqual([{ packs: 2, reason: expect.stringMatching(/DELETE v1\/packs\/.*HTTP 403/), message }]);
  // Whoever mends it need not start anything anew: it is found again, with what it holds.
  bucket.fault = () => undefined;
  await until(() => heldOf(tier, hashes) === 3, 'another look');
  expect(tier.stats().detail!.unreadable_packs).toBe(0);
});

it('packs that a server refuses which refuses everything are known again when it is back', async () => {
  const hashes = await written(12);
  const tier = await open({ refreshMs: 3_600_000 });
  await until(() => heldOf(tier, hashes) === 12, 'what the packs hold');
  bucket.fault = () => 403;
  const statuses = await bench.read(tier, space, hashes, payloadBytes);
  expect([tier.stats().inService, heldOf(tier, hashes)]).toEqual([false, 0]);
  bucket.fault = () => undefined;
  await until(() => tier.stats().inService, 'service');
  expect(statuses).toEqual(hashes.map(() => 'failed'));
  await until(() => heldOf(tier, hashes) === 12, 'all of them');
});

it('a block that is too large for who reads it counts as held there no more, and stays as it is for others', async () => {
  const largeBytes = 20_000;
  const hashes = [hashNamed('a'), hashNamed('b')];
  const [one, two] = [await open(), await open()];
  await bench.write(one, space, hashes, largeBytes);
  await until(() => heldOf(two, hashes) === 2, 'the other node');
  for (let i = 0; i < 2; i++) {
    expect(await bench.read(two, space, hashes, payloadBytes)).toEqual(['missing', 'missing']);
    expect(heldOf(two, hashes)).toBe(0);
  }
  const listingsBefore = listings();
  await until(() => listings() >= listingsBefore + 6, 'listings of both');
  expect([heldOf(two, hashes), two.stats().corrupt, heldOf(one, hashes)]).toEqual([0, 0, 2]);
  expect(await bench.read(one, space, hashes, largeBytes)).toEqual(['ready', 'ready']);
  expect(await bench.write(two, space, hashes, payloadBytes)).toEqual(['stored', 'stored']);
  expect(await bench.read(two, space, hashes, payloadBytes)).toEqual(['ready', 'ready']);
});

/** A full tier of packs with a block each. `replaces`: its server honours If-Match of PUT. */
async function full(
  replaces: boolean,
  settings: object = {},
): Promise<{ tier: S3Tier; log: string[]; hashes: HashKey[] }> {
  const log: string[] = [];
  const told = (_: object, message: string): void => void log.push(message);
  let settingsWritten = 0;
  const refusesMatch = ({ method, key }: { method: string; key: string }): boolean =>
    !replaces && method === 'PUT' && key.endsWith('settings') && ++settingsWritten > 2;
  bucket.fault = (request) => (refusesMatch(request) ? 501 : undefined);
  const bytes = 10 * (96 << 10) + 4096;
  const tier = await open({ bytes, refreshMs: 100, ...settings }, { log: { info: told, warn: told, error: told } });
  const hashes = Array.from({ length: 10 }, (_, i) => hashNamed(`held ${i}`));
  for (const hash of hashes) expect(await bench.write(tier, space, [hash], payloadBytes)).toEqual(['stored']);
  expect(packKeys().length).toBe(10);
  return { tier, log, hashes };
}

it.each([
  ['replaces packs, and refuses writes', true, 'PUT', 403, 0],
  ['replaces packs, and answers writes with 500', true, 'PUT', 500, 0],
  ['deletes before it writes, and refuses writes', false, 'PUT', 403, 1],
  ['deletes before it writes, and refuses to delete', false, 'DELETE', 403, 0],
] as const)(
  'a full server that %s is read on, and nothing more goes for what it does not store',
  async (_, replaces, refused, status, lost) => {
    const { tier, log, hashes } = await full(replaces);
    const told: string[] = [];
    tier.follow(({ kind }) => told.push(kind));
    told.length = 0;
    let news = 0;
    const write = () => bench.write(tier, space, [hashNamed(`new ${news++}`)], payloadBytes);
    bucket.fault = ({ method }) => (method === refused ? status : undefined);
    const requests = (): number => bucket.requests.filter((request) => request.startsWith(`${refused} `)).length;
    const refuses = async (): Promise<void> => expect(await write()).toEqual(['refused']);
    const [listingsBefore, sinceMs] = [listings(), performance.now()];
    while (tier.stats().detail!.writes_refused === 0) await refuses();
    // One pack is tried after a quarter of a second or more, the next one after twice as much, and so on.
    const secondTry = requests() + (status === 500 ? 8 : 2);
    await until(() => refuses().then(() => requests() >= secondTry), 'the second try');
    expect(performance.now() - sinceMs).toBeGreaterThanOrEqual(750);
    await until(() => listings() > listingsBefore + 10, 'listings');
    const held = 10 - lost;
    expect([packKeys().length, heldOf(tier, hashes), tier.stats().evictions]).toEqual([held, held, lost]);
    expect(told).toEqual(lost === 0 ? [] : ['removed']);
    expect(tier.stats()).toMatchObject({
      inService: true,
      outOfServiceReason: expect.stringContaining(`HTTP ${status}`),
    });
    expect(log.filter((line) => line.includes('refuses writes'))).toHaveLength(1);
    const left = hashes.filter((hash) => tier.lookup(space, [hash]) === 1);
    expect(await bench.read(tier, space, left, payloadBytes)).toEqual(left.map(() => 'ready'));
    bucket.fault = () => undefined;
    await until(async () => (await write())[0] === 'stored', 'a write');
    expect(await write()).toEqual(['stored']);
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: '' });
    expect(tier.stats().detail).toMatchObject({ writes_refused: 0 });
    expect(packKeys().length).toBe(10);
  },
);

it('a full server that does not answer writes is out of service, though nobody reads or lists', async () => {
  const { tier, hashes } = await full(true, { refreshMs: 3_600_000, timeLimitMs: 2_500, idleLimitMs: 1_000 });
  let news = 0;
  const write = () => bench.write(tier, space, [hashNamed(`new ${news++}`)], payloadBytes);
  bucket.fault = () => new Promise(() => {});
  // Three tries of a pack, at most: the fifth in all is of another one.
  while (tier.stats().detail!.writes_refused === 0) expect(await write()).toEqual(['refused']);
  expect(tier.stats()).toMatchObject({ inService: false, outOfServiceReason: expect.stringMatching(/^s3: /) });
  expect(heldOf(tier, hashes)).toBe(0);
  bucket.fault = () => undefined;
  await until(() => tier.stats().inService, 'service');
  expect(heldOf(tier, hashes)).toBe(10);
  await until(async () => (await write())[0] === 'stored', 'a write');
});

it('a pack that cannot be replaced is not in the way of each write', async () => {
  const { tier, hashes } = await full(true);
  const [key] = packKeys();
  bucket.fault = ({ method, key: asked }) => (method === 'PUT' && asked === key ? 403 : undefined);
  expect(await bench.write(tier, space, [hashNamed('new 0')], payloadBytes)).toEqual(['refused']);
  for (let i = 1; i < 4; i++)
    expect(await bench.write(tier, space, [hashNamed(`new ${i}`)], payloadBytes)).toEqual(['stored']);
  expect([tier.lookup(space, hashes.slice(0, 1)), tier.stats().evictions]).toEqual([1, 3]);
});

it('lists as many blocks as it may; packs with what is beyond that stay, and their places are taken', async () => {
  const hashes = await written(4);
  const bytes = 4 * (96 << 10) + 4096;
  bucket.objects.delete('kvtier/v1/settings');
  const keys = packKeys();
  for (const [at, key] of keys.entries()) {
    bucket.put(`${packsBelow}${String(at).padStart(8, '0')}.new`, bucket.objects.get(key)!.body);
    bucket.objects.delete(key);
  }
  for (const key of packKeys()) {
    bucket.put(key.slice(0, -4), bucket.objects.get(key)!.body);
    bucket.objects.delete(key);
  }
  const tier = await open({ bytes, maxBlocks: 3 });
  await until(() => tier.stats().detail!.left_out_blocks === 1, 'what is left out');
  expect([heldOf(tier, hashes), tier.stats().blocks, tier.stats().bytes]).toEqual([3, 3, 4 * (96 << 10)]);
  expect(packKeys().length).toBe(4);
  // The tier is full: a write has the place of the coldest pack, and not of one that is taken for nothing.
  expect(await bench.write(tier, space, [hashNamed('new')], payloadBytes)).toEqual(['stored']);
  expect([packKeys().length, tier.lookup(space, [hashNamed('new')])]).toEqual([4, 1]);
  expect(tier.stats().blocks).toBe(3);
});

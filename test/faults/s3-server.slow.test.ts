/**
 * The S3 tier over a real server (Ceph RGW, started once for all of it): several nodes under one budget, and what
 * happens to servers and bodies: stopped, killed, answering 500, cut, flipped, torn. Always: no operation outlives its time limit
 * by much, no wrong block is delivered (the bench throws), nothing above the budget, and service again by itself.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { S3Tier } from '@kvtier/tiers/s3';
import { Bucket, openS3, S3Proxy } from '@kvtier/tiers/s3/testing';
import { byLaw, hashNamed, namespaceNamed, TestBench } from '@kvtier/tiers/testing';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest';
import { until } from '../../infra/redis/servers.ts';
import { makeCertificate, S3Server, s3Credentials } from '../../infra/s3/servers.ts';
import { bundled } from '../../scripts/lib/test-programs.mjs';

const payloadBytes = 20_000;
const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const all = <T>(value: T): T[] => chain.map(() => value);
/** Each operation within this, whatever happens: the limits below, and much room for a busy machine. */
const endsWithinMs = 20_000;
const limits = { timeLimitMs: 3_000, idleLimitMs: 1_000, refreshMs: 100 };

let server: S3Server;
let buckets = 0;
beforeAll(async () => {
  server = await S3Server.start();
}, 120_000);
afterAll(() => server?.stop());

describe('worlds', () => {
  let bench: TestBench;
  let bucket: Bucket;
  const tiers: S3Tier[] = [];
  const proxies: S3Proxy[] = [];
  beforeEach(async () => {
    bench = new TestBench();
    bucket = await Bucket.make(server.url, `world-${++buckets}`);
  });
  afterEach(async () => {
    for (const tier of tiers.splice(0)) {
      tier.checkIntegrity();
      await tier.close();
    }
    for (const proxy of proxies.splice(0)) await proxy.stop();
    bucket.close();
    bench.dispose();
  });

  async function open(settings: Parameters<typeof openS3>[1] | object = {}, options = {}): Promise<S3Tier> {
    const tier = await openS3(bench, { endpoint: server.url, bucket: bucket.name, ...settings }, options);
    tiers.push(tier);
    return tier;
  }
  async function proxied(): Promise<S3Proxy> {
    const proxy = await S3Proxy.start(server.url);
    proxies.push(proxy);
    return proxy;
  }
  const write = (tier: S3Tier, hashes = chain) => bench.write(tier, space, hashes, payloadBytes);
  const read = (tier: S3Tier, hashes = chain) => bench.read(tier, space, hashes, payloadBytes);
  async function withinCap(bytes: number): Promise<void> {
    const held = await bucket.bytes();
    byLaw(3, () => expect(held).toBeLessThanOrEqual(bytes));
  }
  /** The chain is in the bucket: by a tier whose limits no machine is too busy for. */
  async function writtenInPatience(): Promise<void> {
    const tier = await open();
    expect(await write(tier)).toEqual(all('stored'));
    await tier.close();
  }
  /** What is held is read, and something new is stored: writes are refused for a time of their own after failures, and limits are short. */
  async function goesOn(tier: S3Tier): Promise<void> {
    await until(async () => (await read(tier)).every((status) => status === 'ready'), 'reads');
    await until(async () => (await write(tier, [hashNamed('after')]))[0] !== 'refused', 'writes');
    await until(async () => (await read(tier, [hashNamed('after')]))[0] === 'ready', 'what was written');
  }
  async function timed<T>(work: Promise<T>): Promise<T> {
    const startMs = performance.now();
    const result = await work;
    expect(performance.now() - startMs).toBeLessThan(endsWithinMs);
    return result;
  }

  it('another node and another life find the blocks; packs that go are no longer listed', async () => {
    const a = await open();
    const b = await open({ refreshMs: 100 });
    expect(await write(a)).toEqual(all('stored'));
    await until(() => b.lookup(space, chain) === 8, 'the other node');
    expect(await read(b)).toEqual(all('ready'));
    await a.close();
    const again = await open();
    await until(() => again.lookup(space, chain) === 8, 'another life');
    expect(await read(again)).toEqual(all('ready'));
    for (const key of await bucket.packs()) await bucket.delete(key);
    await until(() => b.stats().blocks === 0, 'the packs to vanish');
    expect(await read(again)).toEqual(all('missing'));
    expect(again.stats()).toMatchObject({ blocks: 0, corrupt: 0, inService: true });
  });

  it('two nodes that write far more than the budget stay within it, by what the bucket lists', async () => {
    const bytes = 1 << 20;
    const [a, b] = [await open({ bytes, refreshMs: 100 }), await open({ bytes, refreshMs: 100 })];
    let writing = true;
    let most = 0;
    const watch = async (): Promise<void> => {
      while (writing) most = Math.max(most, await bucket.bytes());
    };
    const watching = watch();
    const node = async (tier: S3Tier, name: string): Promise<number> => {
      let stored = 0;
      for (let round = 0; round < 16; round++) {
        const hashes = Array.from({ length: 8 }, (_, i) => hashNamed(`${name} ${round} ${i}`));
        stored += (await write(tier, hashes)).filter((status) => status === 'stored').length;
        for (const status of await read(tier, hashes)) expect(['ready', 'missing']).toContain(status);
      }
      return stored;
    };
    const stored = await Promise.all([node(a, 'a'), node(b, 'b')]);
    writing = false;
    await watching;
    for (const count of stored) expect(count * payloadBytes).toBeGreaterThan(bytes);
    expect(most).toBeGreaterThan(bytes / 2);
    byLaw(3, () => expect(most).toBeLessThanOrEqual(bytes));
  });

  it('foreign objects under the prefix are left alone, also in the place of a pack', async () => {
    const text = Buffer.alloc(5000, 'not a pack ');
    const foreign = ['kvtier/v1/packs/00000003', 'kvtier/v1/packs/readme', 'kvtier/else', 'kvtier/v1/packs/99999999'];
    for (const key of foreign) await bucket.put(key, text);
    const tier = await open({ bytes: 600 << 10 });
    for (let round = 0; round < 6; round++) {
      const hashes = Array.from({ length: 8 }, (_, i) => hashNamed(`${round} ${i}`));
      expect(await write(tier, hashes)).toEqual(all('stored'));
      expect(await read(tier, hashes)).toEqual(all('ready'));
    }
    expect(tier.stats().evictions).toBeGreaterThan(0);
    expect(tier.stats().detail).toMatchObject({ foreign_objects: 3 });
    await tier.close();
    const left = foreign.filter((key) => key.includes('packs')).sort();
    await open({ bytes: 600 << 10, ttlSeconds: 1, refreshMs: 100 });
    await vi.waitUntil(async () => (await bucket.packs()).length <= left.length, 20_000);
    for (const key of foreign) expect(await bucket.get(key)).toEqual(text);
    expect(await bucket.packs()).toEqual(left);
  });

  it('packs older than their time to live go, by the server’s clock', async () => {
    const tier = await open({ ttlSeconds: 600 });
    await write(tier);
    await tier.close();
    const same = await open({ ttlSeconds: 600 });
    await until(() => same.stats().blocks === 8, 'what is not over');
    await vi.waitUntil(async () => {
      const later = await open({ ttlSeconds: 1 });
      expect(later.stats()).toMatchObject({ evictions: 0 });
      return later.stats().blocks === 0 && (await bucket.packs()).length === 0;
    }, 20_000);
  });

  it('a pack that was replaced is missing; bits that flipped at rest are corrupt, once; a damaged table goes', async () => {
    const a = await open();
    await write(a);
    const [first, second] = await bucket.packs();
    const pack = await bucket.get(first!);
    pack[pack.length - 5000]! ^= 4; // in the last object
    await bucket.put(first!, pack);
    const table = await bucket.get(second!);
    table[100]! ^= 1;
    await bucket.put(second!, table);
    expect(new Set(await read(a))).toEqual(new Set(['missing']));
    expect(a.stats().corrupt).toBe(0);
    const b = await open();
    await until(() => b.stats().blocks === 4, 'the tables');
    await vi.waitUntil(async () => (await bucket.packs()).length === 1, 20_000);
    expect(await bucket.packs()).toEqual([first]);
    expect((await read(b)).toSorted()).toEqual([
      ...Array(1).fill('corrupt'),
      ...Array(4).fill('missing'),
      ...Array(3).fill('ready'),
    ]);
    expect(b.stats()).toMatchObject({ corrupt: 1, blocks: 3 });
    expect((await read(b)).filter((status) => status === 'corrupt')).toEqual([]);
  });

  it('500, 503, cut, torn and flipped on the way: tried again or failed, never wrong, never over the cap', async () => {
    const proxy = await proxied();
    const tier = await open({ endpoint: proxy.url, bytes: 2 << 20 });
    const faults = [500, 'cut', undefined, 503, 'tear', undefined, 'flip', undefined] as const;
    proxy.fault = ({ method, count }) => {
      const fault = faults[count % faults.length];
      return (fault === 'tear' && method !== 'PUT') || (fault === 'flip' && method !== 'GET') ? undefined : fault;
    };
    const seen = new Map<string, number>();
    for (let round = 0; round < 8; round++) {
      const hashes = Array.from({ length: 8 }, (_, i) => hashNamed(`${round} ${i}`));
      for (const status of [...(await timed(write(tier, hashes))), ...(await timed(read(tier, hashes)))]) {
        seen.set(status!, (seen.get(status!) ?? 0) + 1);
      }
      await withinCap(2 << 20);
    }
    expect(tier.stats().detail!.retries).toBeGreaterThan(5);
    expect(seen.get('stored')).toBeGreaterThan(30);
    expect(seen.get('ready')).toBeGreaterThan(20);
    proxy.fault = () => undefined;
    await until(() => tier.stats().inService, 'service');
  });

  it('a server that answers nothing but 500 is out of service, and back by itself', async () => {
    await writtenInPatience();
    const proxy = await proxied();
    const tier = await open({ endpoint: proxy.url, ...limits });
    await until(() => tier.lookup(space, chain) === 8, 'all that is there');
    const told: string[] = [];
    tier.follow(({ kind }) => told.push(kind));
    proxy.fault = () => 500;
    expect(new Set(await timed(read(tier)))).toEqual(new Set(['failed']));
    await until(() => !tier.stats().inService, 'the breaker');
    expect(tier.lookup(space, chain)).toBe(0);
    // Where the machine was too busy for an answer that is the reason at first.
    await until(() => tier.stats().outOfServiceReason.includes('HTTP 500'), 'its reason');
    expect(await write(tier, [hashNamed('new')])).toEqual(['refused']);
    proxy.fault = () => undefined;
    await until(() => tier.stats().inService, 'service', 60_000);
    await goesOn(tier);
    // A machine that is too busy for an answer may have it out of service again.
    expect(told.filter((kind, i) => kind !== told[i - 1]).slice(0, 3)).toEqual(['stored', 'cleared', 'stored']);
  });

  it.each([
    ['the store behind the gateway', (name: 'SIGSTOP' | 'SIGCONT') => server.signalStore(name)],
    ['the gateway', (name: 'SIGSTOP' | 'SIGCONT') => server.signalGateway(name)],
  ])('stopped: %s: everything ends in time, and goes on afterwards', async (_, signal) => {
    await writtenInPatience();
    const tier = await open(limits);
    await until(() => tier.lookup(space, chain) === 8, 'all that is there');
    await signal('SIGSTOP');
    try {
      const more = Array.from({ length: 24 }, (__, i) => hashNamed(`hung ${i}`));
      const [reads, writes] = await timed(Promise.all([read(tier), write(tier, more)]));
      expect(new Set(reads)).toEqual(new Set(['failed']));
      expect(new Set(writes)).toEqual(new Set(['refused']));
      await until(() => !tier.stats().inService, 'the breaker');
      expect(tier.stats().outOfServiceReason).not.toBe('');
    } finally {
      await signal('SIGCONT');
    }
    await until(() => tier.stats().inService, 'service', 60_000);
    await goesOn(tier);
    await withinCap(tier.stats().capacityBytes);
  });

  it('a node killed while it writes leaves whole packs only, and what it said was stored', async () => {
    const bytes = 8 << 20;
    const dir = mkdtempSync(join(tmpdir(), 'kvtier-s3-writer-'));
    const source = new URL('../../packages/store/tiers/src/s3/testing/s3-writer.ts', import.meta.url);
    const [writer] = await bundled(source);
    const settings = { url: server.url, bucket: bucket.name, bytes, payloadBytes, dir };
    const child = spawn(process.execPath, [writer], {
      env: { ...process.env, KVTIER_TEST: JSON.stringify(settings) },
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    try {
      let output = '';
      const ended = new Promise((resolve) => child.once('close', resolve));
      child.stdout.on('data', (text) => {
        output += text;
      });
      await until(() => output.split('\n').length > 30, 'some blocks');
      child.kill('SIGKILL');
      await ended;
      const numbers = output.split('\n').filter((line) => /^\d+$/.test(line));
      await withinCap(bytes);
      const tier = await open({ bytes });
      const hashes = numbers.map((number) => hashNamed(Number(number)));
      const of = namespaceNamed('writer');
      await until(() => hashes.every((hash) => tier.lookup(of, [hash]) === 1), 'all that it said');
      const statuses = await bench.read(tier, of, hashes, payloadBytes);
      expect(new Set(statuses)).toEqual(new Set(['ready']));
    } finally {
      child.kill('SIGKILL');
      rmSync(dir, { recursive: true, force: true });
    }
  });

  it('travels over TLS with an authority of its own', async () => {
    const certificate = makeCertificate(bench.dir);
    const proxy = await S3Proxy.start(server.url, certificate);
    proxies.push(proxy);
    const caFile = join(bench.dir, 'ca.pem');
    writeFileSync(caFile, certificate.cert);
    const tier = await open({ endpoint: proxy.url, caFile });
    expect(await write(tier)).toEqual(all('stored'));
    expect(await read(tier)).toEqual(all('ready'));
    await expect(open({ endpoint: proxy.url })).rejects.toThrow(/self-signed certificate|certificate/);
  });

  it.each([
    [
      'its quota is used up',
      () => server.setQuota(bucket.name, 1),
      () => server.setQuota(bucket.name, undefined),
      /^writes are refused: s3: .* has no room left for bucket .*PUT v1\/settings: HTTP 403 QuotaExceeded\); raise/,
    ],
    [
      'it may only be read',
      () => bucket.forbid('s3:PutObject', 's3:DeleteObject'),
      () => bucket.allowAll(),
      /^writes are refused: s3: .* refuses writes to bucket .*PUT v1\/settings: HTTP 403 AccessDenied\); allow/,
    ],
    [
      'nothing of it may be deleted',
      () => bucket.forbid('s3:DeleteObject'),
      () => bucket.allowAll(),
      /^writes are refused: s3: .* refuses writes to bucket .*DELETE v1\/packs\/none: HTTP 403 AccessDenied\); allow/,
    ],
  ])('a bucket is opened and read though %s, and written when it may be', async (_, refuse, allow, reason) => {
    await writtenInPatience();
    await refuse();
    const tier = await open({ refreshMs: 100 });
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: expect.stringMatching(reason) });
    expect(tier.stats().detail).toMatchObject({ writes_refused: 1 });
    await until(() => tier.lookup(space, chain) === 8, 'all that is there');
    expect(await read(tier)).toEqual(all('ready'));
    expect(await write(tier, [hashNamed('new')])).toEqual(['refused']);
    await allow();
    await goesOn(tier);
    expect(tier.stats().detail).toMatchObject({ writes_refused: 0 });
  });

  it('what cannot work is refused at the start, in one line', async () => {
    const refused = async (settings: object, message: RegExp, code = 'CONFIG'): Promise<void> => {
      const error = await open({ ...limits, ...settings }).catch(
        (thrown: unknown) => thrown as Error & { code: string },
      );
      expect(error).toMatchObject({ code, message: expect.stringMatching(message) });
      expect((error as Error).message).not.toContain('\n');
    };
    await refused({ bucket: 'no-such-bucket' }, /^s3: bucket no-such-bucket does not exist at http/);
    await refused({ secretAccessKey: 'wrong' }, /^s3: .* refuses the credentials for bucket .*403/);
    await refused({ accessKeyId: undefined }, /accessKeyId and secretAccessKey belong together/);
    await refused({ endpoint: 'localhost:1' }, /endpoint "localhost:1" is not a URL/);
    await refused({ endpoint: 'http://127.0.0.1:1' }, /127\.0\.0\.1:1 does not answer .*ECONNREFUSED/, 'IO');
    await refused({ bytes: 50_000 }, /50000 bytes hold no pack of 98304/);
    await refused({ caFile: '/none' }, /^s3\.caFile: \/none: cannot be used \(ENOENT.*; name a readable PEM file$/);
    await (await open()).close();
    await refused({ bytes: 3 << 20 }, /share a budget of .*packCount.*configure the same bytes/);
    expect(s3Credentials.accessKeyId).not.toBe('');
  });
});

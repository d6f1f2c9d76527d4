/**
 * Whole nodes over a real S3 (Ceph RGW) and a real Redis: what cannot work is refused at the start with one line; every tier in one
 * node; S3 stopped, killed and answering 500 under load. One server for all tests: it takes seconds to start.
 */
import { writeFileSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import path from 'node:path';
import { Bucket, S3Proxy } from '@kvtier/tiers/s3/testing';
import { byLaw } from '@kvtier/tiers/testing';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import { freePort } from '../../infra/ports.ts';
import { RedisServer, until } from '../../infra/redis/servers.ts';
import { S3Server, s3Credentials } from '../../infra/s3/servers.ts';
import { NodeLoad, Pair, tierOf } from './node-load.ts';
import { type NodeClient, NodeRig } from './node-rig.ts';

let s3: S3Server;
let redis: RedisServer;
let faulty: Server;
let faultyUrl: string;
const buckets: Bucket[] = [];
let pair: Pair | undefined;
beforeAll(async () => {
  [s3, redis] = await Promise.all([S3Server.start(), RedisServer.start({ config: ['requirepass secret'] })]);
  faulty = createServer((request, response) => {
    request.resume();
    response.writeHead(500).end('<Error><Code>InternalError</Code></Error>');
  });
  await new Promise<void>((resolve) => faulty.listen(0, '127.0.0.1', resolve));
  faultyUrl = `http://127.0.0.1:${(faulty.address() as AddressInfo).port}`;
}, 120_000);
afterEach(async () => {
  await pair?.dispose();
  pair = undefined;
  for (const bucket of buckets.splice(0)) bucket.close();
});
afterAll(async () => {
  faulty?.close();
  await Promise.all([s3?.stop(), redis?.stop()]);
});

const s3Bytes = 64 << 20;
async function newBucket(): Promise<Bucket> {
  const bucket = await Bucket.make(s3.url, `node-${process.pid}-${Date.now() % 1e6}-${buckets.length}`);
  buckets.push(bucket);
  return bucket;
}
const s3Of = (bucket: string, changes: object = {}): object => ({
  ...{
    endpoint: s3.url,
    bucket,
    bytes: s3Bytes,
    packBytes: 4 << 20,
    refreshMs: 200,
    timeLimitMs: 2_000,
    idleLimitMs: 1_000,
  },
  accessKeyId: s3Credentials.accessKeyId, // one by one: the SDK adds to the object
  secretAccessKey: s3Credentials.secretAccessKey,
  ...changes,
});
const redisOf = (changes: object = {}): object => ({
  ...{ servers: [redis.url], password: 'secret', bytes: 32 << 20, timeLimitMs: 1_000 },
  ...changes,
});

describe('refused at the start, with one line', () => {
  it.concurrent.each<[string, () => object | Promise<object>, RegExp]>([
    [
      'redis: wrong password',
      () => ({ redis: redisOf({ password: 'wrong', ...patientRedis }) }),
      /^cache-node: CONFIG: redis.*(password|WRONGPASS)/i,
    ],
    [
      'redis: no password',
      () => ({ redis: redisOf({ password: undefined, ...patientRedis }) }),
      /^cache-node: CONFIG: redis.*(NOAUTH|password)/i,
    ],
    [
      'redis: no such database',
      () => ({ redis: redisOf({ database: 99, ...patientRedis }) }),
      /^cache-node: CONFIG: redis/,
    ],
    [
      'redis: a password file that is not there',
      () => ({ redis: redisOf({ password: undefined, passwordFile: '/nowhere' }) }),
      /^cache-node: CONFIG: .*\/nowhere/,
    ],
    [
      'redis: another scheme',
      () => ({ redis: redisOf({ servers: ['http://x'] }) }),
      /^cache-node: CONFIG: .*redis\.servers\.0/,
    ],
    ['s3: no such bucket', () => ({ s3: s3Of('no-such-bucket', patient) }), /^cache-node: CONFIG: s3.*no-such-bucket/],
    [
      's3: a wrong secret',
      async () => ({ s3: s3Of((await newBucket()).name, { secretAccessKey: 'wrong', ...patient }) }),
      /^cache-node: CONFIG: s3.*credentials/,
    ],
    [
      's3: an unknown user',
      async () => ({ s3: s3Of((await newBucket()).name, { accessKeyId: 'nobody', ...patient }) }),
      /^cache-node: CONFIG: s3.*credentials/,
    ],
    [
      's3: a budget that holds no pack',
      () => ({ s3: s3Of('bucket', { bytes: 2 << 20 }) }),
      /^cache-node: CONFIG: .*s3\.bytes.*pack/,
    ],
    [
      'peers: a secret that is not there',
      () => ({ peers: { security: { encryption: 'none', secretFile: '/nowhere' } } }),
      /^cache-node: CONFIG: .*\/nowhere/,
    ],
    [
      'kvEvents beyond loopback without keys',
      () => ({ kvEvents: { endpoint: 'tcp://0.0.0.0:5557' } }),
      /^cache-node: CONFIG: .*curve/i,
    ],
  ])('%s', async (_what, configOf, line) => {
    const rig = new NodeRig({ diskBytes: null });
    try {
      await expect(rig.start({ config: await configOf() })).rejects.toThrow(line);
      expect(rig.stderr.trim().split('\n')).toHaveLength(1);
      expect(rig.stderr).not.toContain('secret:');
    } finally {
      await rig.dispose();
    }
  });
});

/** A write that does not end in time is only tried again when its block is used: not here, on a busy machine. */
const patient = { timeLimitMs: 30_000, idleLimitMs: 20_000 };
const patientRedis = { timeLimitMs: 20_000 };

/** Two nodes with all five tiers. */
async function cluster(bucket: string): Promise<Pair> {
  pair = new Pair(new NodeRig({ diskBytes: 64 << 20 }), new NodeRig({ diskBytes: 64 << 20 }));
  const places = [await freePort(), await freePort()].map((port) => ({ host: '127.0.0.1', port }));
  await Promise.all(
    [pair.a, pair.b].map((rig, index) => {
      const secretFile = path.join(rig.folder, 'secret');
      writeFileSync(secretFile, 'x'.repeat(48), { mode: 0o600 });
      const peers = { listen: places[index], peers: [places[1 - index]], security: { encryption: 'none', secretFile } };
      const placement = {
        disk: { codec: 'lz4', ttlSeconds: 86_400 },
        redis: { promote: false, codec: 'lz4' },
        s3: { write: 'through', codec: 'planes+lz4', promote: false },
      };
      const config = {
        arena: { bytes: 16 << 20 },
        redis: redisOf(patientRedis),
        s3: s3Of(bucket, patient),
        peers,
        placement,
      };
      return rig.start({ config });
    }),
  );
  return pair;
}

const holds = (engine: NodeClient, tier: string, count: number) =>
  until(async () => (await tierOf(engine, tier)).blocks >= BigInt(count), `${count} blocks in ${tier}`, 60_000);

it('a node with every tier: the other one is served by the fastest that holds the blocks, down to the last', async () => {
  const bucket = await newBucket();
  await bucket.put('kvtier/somebody-elses', Buffer.from('not ours'));
  await redis.cli('-a', 'secret', 'set', 'kvtier:somebody-elses', 'not ours');
  const { a, b } = await cluster(bucket.name);
  const writer = await a.attach();
  const reader = await b.attach();
  expect((await writer.stats()).tiers.map(({ tier }) => tier)).toEqual(['arena', 'disk', 'peer', 'redis', 's3']);

  await writer.put('once', 8);
  await writer.put('other', 8);
  await holds(writer, 's3', 16);
  await holds(writer, 'redis', 16);
  await holds(reader, 'peer', 16);
  await holds(reader, 's3', 16);
  expect((await reader.load('once', 8)).tiers).toEqual(Array(8).fill('peer'));
  await writer.end();
  await a.stop('SIGKILL');
  await until(async () => (await tierOf(reader, 'peer')).blocks === 0n, 'the loss of the peer', 60_000);
  await reader.end();
  await b.stop('SIGKILL');

  // New machines: no arena, no disk of before, no peer.
  const c = new NodeRig({ diskBytes: null });
  await c.start({
    config: { redis: redisOf(patientRedis), s3: s3Of(bucket.name, patient), placement: { redis: { promote: false } } },
  });
  try {
    const late = await c.attach();
    await holds(late, 'redis', 16);
    await holds(late, 's3', 16);
    expect((await late.load('other', 8)).tiers).toEqual(Array(8).fill('redis'));
    expect(await redis.cli('-a', 'secret', 'get', 'kvtier:somebody-elses')).toContain('not ours');
    await redis.cli('-a', 'secret', 'flushall');
    await until(async () => (await tierOf(late, 'redis')).blocks === 0n, 'the empty Redis', 60_000);
    expect((await late.load('once', 8)).tiers).toEqual(Array(8).fill('s3'));
    await late.end();
    expect(String(await bucket.get('kvtier/somebody-elses'))).toBe('not ours');
  } finally {
    await c.dispose();
  }
});

it('S3 hangs and is killed under load: nothing fails, and it is back', async () => {
  const bucket = await newBucket();
  await redis.cli('-a', 'secret', 'flushall');
  const rig = new NodeRig({ diskBytes: null });
  try {
    await rig.start({ config: { arena: { bytes: 4 << 20 }, s3: s3Of(bucket.name) } });
    const ask = await rig.attach();
    const engines = [await rig.attach(), await rig.attach()];
    const load = new NodeLoad(engines, 16);
    const usable = async (): Promise<boolean> => {
      const { inService, breaker } = await tierOf(ask, 's3');
      return inService && breaker === 'closed';
    };
    await load.servedFrom('s3');
    await s3.signalGateway('SIGSTOP');
    await load.until(async () => !(await usable()), 'out of service');
    await load.more(15);
    await s3.signalGateway('SIGCONT');
    await load.until(usable, 'in service');
    await load.servedFrom('s3');
    await s3.killGateway();
    await load.until(async () => !(await usable()), 'out of service');
    await load.more(15);
    await s3.startGateway();
    await load.until(usable, 'in service');
    await load.servedFrom('s3');
    await load.stop();
    const report = await tierOf(ask, 's3');
    expect(report.corrupt).toBe(0n);
    byLaw(3, () => expect(report.bytes).toBeLessThanOrEqual(BigInt(s3Bytes)));
    for (const engine of [ask, ...engines]) await engine.end();
  } finally {
    await rig.dispose();
  }
});

it('S3 answers 500, 503 and half answers under load, then nothing but 500: nothing fails, and it is back', async () => {
  const bucket = await newBucket();
  const proxy = await S3Proxy.start(s3.url);
  const rig = new NodeRig({ diskBytes: null });
  try {
    await rig.start({ config: { arena: { bytes: 4 << 20 }, s3: s3Of(bucket.name, { endpoint: proxy.url }) } });
    const ask = await rig.attach();
    const engines = [await rig.attach(), await rig.attach()];
    const load = new NodeLoad(engines, 16);
    const usable = async (): Promise<boolean> => {
      const { inService, breaker } = await tierOf(ask, 's3');
      return inService && breaker === 'closed';
    };
    await load.servedFrom('s3');
    const bad = [500, undefined, undefined, 'cut', undefined, undefined, 503, undefined, 'tear', undefined] as const;
    proxy.fault = ({ count }) => bad[count % bad.length];
    const before = proxy.count;
    await load.until(() => proxy.count > before + 5 * bad.length, 'each fault a few times');
    // What it has been taken out of service for by then is another reason.
    proxy.fault = () => undefined;
    await load.until(usable, 'in service');
    proxy.fault = () => 500;
    // On a busy machine a request of before may have been too slow, and that is the reason at first; it is followed by the probe's.
    const goneFor500 = async (): Promise<boolean> => {
      const { inService, outOfServiceReason } = await tierOf(ask, 's3');
      return !inService && /HTTP 500/.test(outOfServiceReason);
    };
    await load.until(goneFor500, 'out of service for HTTP 500');
    await load.more(15);
    proxy.fault = () => undefined;
    await load.until(usable, 'in service');
    await load.servedFrom('s3');
    await load.stop();
    const report = await tierOf(ask, 's3');
    expect(report.corrupt).toBe(0n);
    byLaw(3, () => expect(report.bytes).toBeLessThanOrEqual(BigInt(s3Bytes)));
    const stored = [...(await bucket.list()).values()].reduce((sum, bytes) => sum + bytes, 0);
    byLaw(3, () => expect(stored).toBeLessThanOrEqual(s3Bytes));
    for (const engine of [ask, ...engines]) await engine.end();
  } finally {
    await rig.dispose();
    await proxy.stop();
  }
});

it('a server that answers 500 from the start is no reason not to start', async () => {
  const rig = new NodeRig({ diskBytes: null });
  try {
    await rig.start({ config: { s3: s3Of('bucket', { endpoint: faultyUrl }) } });
    const engine = await rig.attach();
    expect((await tierOf(engine, 's3')).inService).toBe(false);
    await engine.put('x', 4);
    expect(await engine.load('x', 4)).toMatchObject({ loaded: 4, tiers: Array(4).fill('arena') });
    await engine.end();
  } finally {
    await rig.dispose();
  }
});

/**
 * What happens to Redis happens to real servers here: killed, stopped, emptied, full, failed over. Always: no operation outlives its
 * time limit by much, no wrong block is delivered (the bench throws), nothing above the budget, and service again by itself.
 */

import { RedisClient } from '@kvtier/redis';
import type { RedisSettings, RedisTier } from '@kvtier/tiers/redis';
import { openTier } from '@kvtier/tiers/redis/testing';
import { hashNamed, namespaceNamed, TestBench } from '@kvtier/tiers/testing';
import { Cluster, Redis } from 'ioredis';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import {
  makeCertificate,
  RedisServer,
  type ServerGroup,
  SlotMove,
  startCluster,
  startSentinel,
  until,
} from '../../infra/redis/servers.ts';

const payloadBytes = 100_000;
const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
/** Where no server stands still: no machine is too busy for an answer within it. */
const timeLimitMs = 10_000;
/** Where one does. */
const shortLimitMs = 1_500;
/** Each operation within this, whatever happens. */
const endsWithinMs = 30_000;

let bench: TestBench;
let tier: RedisTier | undefined;
let group: { stop(): Promise<void> } | undefined;
/** Ends the load of a test that failed before it could. */
let stopLoad: (() => Promise<unknown>) | undefined;
beforeEach(() => {
  bench = new TestBench();
});
afterEach(async () => {
  await stopLoad?.().catch(() => {}); // its test has said what is wrong
  stopLoad = undefined;
  await tier?.close();
  await group?.stop();
  tier = undefined;
  group = undefined;
  bench.dispose();
});

/** Writes and reads until told to stop; returns how many of each status there were. */
function load(over: RedisTier): () => Promise<Map<string, number>> {
  const counts = new Map<string, number>();
  let running = true;
  const worker = async (number: number): Promise<void> => {
    for (let round = 0; running; round++) {
      const hashes = Array.from({ length: 4 }, (_, i) => hashNamed(`${number} ${round % 8} ${i}`));
      const startMs = performance.now();
      const statuses = [
        ...(await bench.write(over, space, hashes, payloadBytes)),
        ...(await bench.read(over, space, hashes, payloadBytes)),
      ];
      expect(performance.now() - startMs).toBeLessThan(2 * endsWithinMs);
      for (const status of statuses) counts.set(status!, (counts.get(status!) ?? 0) + 1);
      await new Promise((resolve) => setTimeout(resolve, 5));
    }
  };
  const workers = Promise.all([0, 1, 2].map(worker));
  workers.catch(() => {}); // told to whoever stops it
  stopLoad = async () => {
    running = false;
    await workers;
  };
  return async () => {
    running = false;
    await workers;
    return counts;
  };
}

const isBack = (): boolean => tier!.stats().inService;
const isOut = (): boolean => !tier!.stats().inService;
const partitionsOut = (): number => tier!.stats().detail!.partitions_out!;
const areStored = async (): Promise<boolean> =>
  (await bench.write(tier!, space, chain, payloadBytes)).every((status) => status === 'stored' || status === 'held');
const areReady = async (): Promise<boolean> =>
  (await bench.read(tier!, space, chain, payloadBytes)).every((status) => status === 'ready');

/** A server that has only just begun may not answer within so short a limit: a tier begins without it as a node does. */
const openSoon = async (settings: Partial<RedisSettings> & Pick<RedisSettings, 'servers'>): Promise<void> => {
  tier = await openTier(bench, { timeLimitMs, ...settings }, { openWithoutServer: true });
  await until(isBack, 'in service');
};

describe('one server', () => {
  let server: RedisServer;
  const open = async (persistent = false, settings: Partial<RedisSettings> = {}): Promise<void> => {
    server = await RedisServer.start({ persistent });
    group = server;
    await openSoon({ servers: [server.url], bytes: 16 << 20, partBytes: 32_768, ...settings });
  };

  it('killed under load and started again with its data: out, back, and what was stored is read', async () => {
    await open(true);
    expect(await bench.write(tier!, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
    const told: string[] = [];
    tier!.follow(({ kind }) => told.push(kind));
    const stop = load(tier!);
    await until(() => tier!.stats().blocks > 20, 'some load');
    await server.kill();
    await until(isOut, 'out of service');
    expect(tier!.lookup(space, chain)).toBe(0);
    expect(tier!.stats()).toMatchObject({ inService: false, blocks: 0 });
    expect(tier!.stats().outOfServiceReason).not.toBe('');
    expect(await bench.write(tier!, space, [hashNamed('new')], payloadBytes)).toEqual(['refused']);
    await server.start();
    await until(isBack, 'back in service');
    const counts = await stop();
    await until(areReady, 'what was stored');
    expect(tier!.lookup(space, chain)).toBe(8);
    expect(told).toContain('cleared');
    expect(counts.get('corrupt') ?? 0).toBe(0);
    tier!.checkIntegrity();
  });

  it('a client that gave up for good, as ioredis does when a failover is announced while it connects: connects anew', async () => {
    const { connect } = Redis.prototype;
    let lost = 0;
    const connecting = vi.spyOn(Redis.prototype, 'connect').mockImplementation(function (this: Redis) {
      const connected = connect.call(this);
      // What its failover detector does: FailoverDetector.disconnect().
      if (lost++ === 1) (this as unknown as { connector: { disconnect(): void } }).connector.disconnect();
      return connected;
    });
    try {
      await open();
      await server.kill();
      await until(() => lost > 1, 'the second connection');
      await server.start();
      await until(isBack, 'back in service');
    } finally {
      connecting.mockRestore();
    }
  });

  it('not there yet when a node starts that may start without it: in service once it is there', async () => {
    server = await RedisServer.start();
    group = server;
    await server.kill();
    tier = await openTier(bench, { servers: [server.url], timeLimitMs }, { openWithoutServer: true });
    expect(tier.stats()).toMatchObject({ inService: false, blocks: 0 });
    expect(await bench.write(tier, space, [chain[0]!], 20_000)).toEqual(['refused']);
    await server.start();
    await until(isBack, 'in service');
    await until(async () => (await bench.write(tier!, space, [chain[0]!], 20_000))[0] !== 'refused', 'writes');
    expect(await bench.read(tier, space, [chain[0]!], 20_000)).toEqual(['ready']);
  });

  it('started again without its data: what is gone is gone, and it is filled anew', async () => {
    await open();
    await bench.write(tier!, space, chain, payloadBytes);
    await server.kill();
    await until(isOut, 'out of service');
    await server.start();
    await until(isBack, 'back in service');
    expect(tier!.lookup(space, chain)).toBe(0);
    expect(tier!.stats()).toMatchObject({ blocks: 0, bytes: 0 });
    await until(areStored, 'writes');
    await until(areReady, 'reads');
  });

  it('emptied, or robbed of its directory, under way: noticed, and values that nothing names are cleared away', async () => {
    await open();
    await bench.write(tier!, space, chain, payloadBytes);
    await server.cli('flushall');
    await until(() => isBack() && tier!.stats().blocks === 0, 'the empty server');
    await until(areStored, 'writes');
    await server.cli('del', 'kvtier:{p0}:blocks');
    await until(() => isBack() && tier!.stats().blocks === 0, 'a new directory');
    await until(async () => (await server.cli('keys', 'kvtier:{p0}:v:*')) === '', 'the orphans');
    expect(tier!.stats().bytes).toBe(0);
  });

  it('stopped (SIGSTOP): reads fail and writes are refused within the limit; continued, it serves again', async () => {
    await open(false, { timeLimitMs: shortLimitMs });
    await until(areStored, 'all of them');
    server.signal('SIGSTOP');
    const startMs = performance.now();
    const [reads, writes] = await Promise.all([
      bench.read(tier!, space, chain, payloadBytes),
      bench.write(tier!, space, [hashNamed('late')], payloadBytes),
    ]);
    expect(performance.now() - startMs).toBeLessThan(endsWithinMs);
    expect(reads).toEqual(chain.map(() => 'failed'));
    expect(writes).toEqual(['refused']);
    await until(isOut, 'out of service');
    server.signal('SIGCONT');
    await until(isBack, 'back in service');
    await until(areReady, 'reads');
  });

  it('out of memory by others: writes are refused, reads go on, and no budget is lost', async () => {
    await open();
    await bench.write(tier!, space, chain, payloadBytes);
    await server.cli('config', 'set', 'maxmemory', '1mb');
    expect(await bench.write(tier!, space, [hashNamed('more')], payloadBytes)).toEqual(['refused']);
    expect(await bench.read(tier!, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    expect(tier!.stats().inService).toBe(true);
    const { bytes } = tier!.stats();
    await server.cli('config', 'set', 'maxmemory', '0');
    expect(await bench.write(tier!, space, [hashNamed('more')], payloadBytes)).toEqual(['stored']);
    expect(tier!.stats().bytes).toBe((bytes / 8) * 9);
  });
});

const survives = async (victim: RedisServer): Promise<void> => {
  const stop = load(tier!);
  await until(() => tier!.stats().blocks > 20, 'some load');
  await victim.kill();
  await until(() => partitionsOut() > 0, 'out of service, with the partitions that it has');
  try {
    await until(() => isBack() && partitionsOut() === 0, 'the failover');
  } catch (error) {
    throw new Error(`${(error as Error).message}: ${tier!.stats().outOfServiceReason}`);
  }
  await bench.write(tier!, space, chain, payloadBytes);
  await until(async () => {
    await bench.write(tier!, space, chain, payloadBytes);
    return await areReady();
  }, 'service on the new master');
  const counts = await stop();
  expect(counts.get('corrupt') ?? 0).toBe(0);
  expect(counts.get('ready')).toBeGreaterThan(0);
  tier!.checkIntegrity();
};

it('a Cluster’s master dies under load: its replica takes over, and the tier is back by itself', async () => {
  const cluster: ServerGroup = await startCluster(3, 1);
  group = cluster;
  await openSoon({ mode: 'cluster', servers: cluster.urls, bytes: 24 << 20, partBytes: 32_768 });
  await survives(cluster.servers[0]!);
});

it('a Cluster’s client that learns of a server while it disconnects, as ioredis may: connects anew', async () => {
  const cluster = await startCluster(3, 0);
  group = cluster;
  await openSoon({ mode: 'cluster', servers: cluster.urls, bytes: 24 << 20 });
  const { disconnect } = Cluster.prototype;
  let late = 0;
  const disconnecting = vi.spyOn(Cluster.prototype, 'disconnect').mockImplementation(function (this: Cluster, again) {
    disconnect.call(this, again);
    if (again !== true || late++ > 0) return;
    // What the answer to CLUSTER SLOTS does that comes too late: a node that is made, and connects when it is asked something.
    const { port } = cluster.servers[0]!;
    const pool = (this as unknown as { connectionPool: { findOrCreate(node: object): void } }).connectionPool;
    pool.findOrCreate({ host: '127.0.0.1', port });
  });
  try {
    await cluster.servers[0]!.kill();
    await until(() => late > 0, 'out of service');
    await cluster.servers[0]!.start();
    await until(isBack, 'back in service');
  } finally {
    disconnecting.mockRestore();
  }
});

describe('a Cluster without replicas', () => {
  const many = Array.from({ length: 48 }, (_, i) => hashNamed(i));
  const all = (status: string): string[] => many.map(() => status);

  it('is not asked again what a connection took with it: it may have been done', async () => {
    const cluster = await startCluster(3, 0);
    group = cluster;
    const settings = { mode: 'cluster', servers: cluster.urls, database: 0, timeLimitMs: 20_000 } as const;
    const client = new RedisClient(settings, () => {});
    try {
      await client.ready(20_000);
      const key = 'kvtier:{p0}:count';
      expect(await client.ask((redis) => redis.incr(key))).toBe(1);
      for (const each of cluster.servers) each.signal('SIGSTOP');
      const asked = client.ask((redis) => redis.incr(key));
      const streams = client.now((redis) => (redis as Cluster).nodes('all').flatMap(({ stream }) => stream ?? []));
      await until(() => streams.every(({ writableLength }) => writableLength === 0), 'it is written');
      for (const stream of streams) stream.destroy();
      for (const each of cluster.servers) each.signal('SIGCONT');
      await expect(asked).rejects.toThrow(/^redis: Connection is closed/);
      await client.ready(20_000);
      const count = (): Promise<string | null> => client.ask((redis) => redis.get(key)).catch(() => null);
      await until(async () => (await count()) !== null, 'its server');
      expect(await count()).toBe('2');
    } finally {
      client.close();
    }
  });

  it('speaks TLS, also between its servers', async () => {
    const tls = makeCertificate(bench.dir);
    const cluster = await startCluster(3, 0, tls);
    group = cluster;
    const settings = {
      mode: 'cluster',
      servers: cluster.urls,
      tls: { caFile: tls.certFile },
      timeLimitMs: 5_000,
    } as const;
    tier = await openTier(bench, { ...settings, bytes: 24 << 20, partBytes: 32_768 });
    expect(await bench.write(tier, space, many, payloadBytes)).toEqual(all('stored'));
    expect(await bench.read(tier, space, many, payloadBytes)).toEqual(all('ready'));
    const perServer = await Promise.all(cluster.servers.map(async (server) => Number(await server.cli('dbsize'))));
    expect(Math.min(...perServer)).toBeGreaterThan(0);
    await expect(openTier(bench, { ...settings, tls: undefined, timeLimitMs })).rejects.toThrow(
      /^redis: .*; check .*caFile/,
    );
  });

  it('moves a slot: what has gone already is read by ASK; at its end all is found, and writes go on', async () => {
    const cluster = await startCluster(3, 0);
    group = cluster;
    const settings = { mode: 'cluster', servers: cluster.urls, timeLimitMs: 5_000, bytes: 24 << 20 } as const;
    tier = await openTier(bench, { ...settings, partBytes: 32_768 });
    const follower = await openTier(bench, { ...settings, partBytes: 32_768 });
    try {
      expect(await bench.write(tier, space, many, payloadBytes)).toEqual(all('stored'));
      await until(async () => follower.stats().blocks === many.length, 'all of them at the follower');
      const [source, target] = cluster.servers as [RedisServer, RedisServer];
      const value = (await source.cli('keys', 'kvtier:*:v:*')).split('\n')[0]!;
      const moving = await SlotMove.begin(cluster, source, target, await source.cli('cluster', 'keyslot', value));
      const values = (await moving.keys()).filter((key) => key.includes(':v:'));
      expect(values.length).toBeGreaterThan(3); // the parts of a block, at least
      await moving.move(values.filter((_, index) => index % 2 === 0));
      expect(await bench.read(tier, space, many, payloadBytes)).toEqual(all('ready'));
      expect(await source.cli('info', 'errorstats')).toMatch(/errorstat_ASK:count=[1-9]/);
      await until(async () => {
        await bench.read(follower, space, many, payloadBytes);
        return (await source.cli('info', 'errorstats')).includes('errorstat_TRYAGAIN');
      }, 'a script that the slot’s move concerns');
      expect(await bench.read(follower, space, many, payloadBytes)).toEqual(all('ready'));
      for (const each of [tier, follower])
        expect(each.stats()).toMatchObject({ inService: true, outOfServiceReason: '' });
      await moving.end();

      const isReady = async (hashes: typeof many): Promise<boolean> =>
        (await bench.read(follower, space, hashes, payloadBytes)).every((status) => status === 'ready');
      await until(() => isReady(many), 'reads from the new master');
      const more = many.map((_, i) => hashNamed(`more ${i}`));
      await until(async () => {
        const statuses = await bench.write(follower, space, more, payloadBytes);
        return statuses.every((status) => status === 'stored' || status === 'held');
      }, 'writes to the new master');
      await until(() => isReady([...many, ...more]), 'all of them');
      expect(follower.stats()).toMatchObject({ corrupt: 0, blocks: 96 });
      follower.checkIntegrity();
    } finally {
      await follower.close();
    }
  });

  it('moves a slot while writes evict: scripts do all or nothing, and no value is left that nobody counts', async () => {
    const cluster = await startCluster(3, 0);
    group = cluster;
    const settings = { mode: 'cluster', servers: cluster.urls, timeLimitMs: 5_000, bytes: 4 << 20 } as const;
    const policies = { default: { ttlSeconds: 3600 } };
    tier = await openTier(bench, { ...settings, policies, partBytes: 32_768 }, { leaseMs: 1_000 });
    for (const hash of many) await bench.write(tier, space, [hash], payloadBytes);
    expect(tier.stats().evictions).toBeGreaterThan(0);
    const [source, target] = cluster.servers as [RedisServer, RedisServer];
    const value = (await source.cli('keys', 'kvtier:*:v:*')).split('\n')[0]!;
    // All keys of the directory are there, with something that expires and a lease: else no script would run at all while they move.
    const leases = value.replace(/v:.*/, 'leases');
    await source.cli('zadd', leases, '9e15', 'never ends');
    const stop = load(tier);
    const moving = await SlotMove.begin(cluster, source, target, await source.cli('cluster', 'keyslot', value));
    const fresh = (step: number): Promise<unknown> =>
      bench.write(
        tier!,
        space,
        many.map((_, i) => hashNamed(`step ${step} ${i}`)),
        payloadBytes,
      );
    await fresh(0);
    const isValue = (key: string): boolean => key.includes(':v:');
    await moving.move((await moving.keys()).filter((key, i) => isValue(key) && i % 2 === 0));
    await fresh(1);
    await moving.move((await moving.keys()).filter((key) => !isValue(key)));
    await fresh(2);
    await moving.end();
    await target.cli('zrem', leases, 'never ends');
    const counts = await stop();
    expect(counts.get('corrupt') ?? 0).toBe(0);
    expect(tier.stats().outOfServiceReason).toBe('');
    // Leases that could not be given back meanwhile end by themselves; then all keys are those of entries.
    await until(async () => (await uncounted(cluster)).length === 0, 'every value to have an entry');
    tier.checkIntegrity();
    expect(tier.stats().corrupt).toBe(0);
    await until(
      async () => (await bench.write(tier!, space, chain, payloadBytes)).every((s) => s !== 'refused'),
      'writes',
    );
  });
});

/** Keys of values that no entry names. */
async function uncounted(cluster: ServerGroup): Promise<string[]> {
  const lines = async (server: RedisServer, ...command: string[]): Promise<string[]> =>
    (await server.cli(...command)).split('\n').filter(Boolean);
  const named = new Set<string>();
  const values: string[] = [];
  for (const server of cluster.servers) {
    const keys = await lines(server, 'keys', 'kvtier:*');
    values.push(...keys.filter((key) => key.includes(':v:')));
    for (const ledger of keys.filter((key) => key.endsWith(':ledger'))) {
      const base = ledger.slice(0, -'ledger'.length);
      const entries = await lines(server, 'hvals', `${base}blocks`);
      for (const entry of entries) named.add(`${base}v:${entry.split(' ')[2]}`);
    }
  }
  return values.filter((key) => !named.has(key.slice(0, key.lastIndexOf(':'))));
}

it('the master under Sentinels dies under load: the replica takes over, and the tier is back by itself', async () => {
  const sentinel = await startSentinel();
  group = sentinel;
  const settings = { mode: 'sentinel', masterName: 'kvtier', servers: sentinel.urls } as const;
  await openSoon({ ...settings, bytes: 16 << 20, partBytes: 32_768 });
  await survives(sentinel.servers[0]!);
});

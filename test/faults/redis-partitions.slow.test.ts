/**
 * A Cluster that serves what it can (`cluster-require-full-coverage no`) while one of its masters is dead or says nothing: that costs the
 * partitions of this one. The others are read and written all the while, nobody is told that the tier is empty, and what the master still
 * has when it is back is listed again.
 */
import { rmSync } from 'node:fs';
import { join } from 'node:path';
import type { RedisTier, RedisTierOptions } from '@kvtier/tiers/redis';
import { openTier } from '@kvtier/tiers/redis/testing';
import { hashNamed, namespaceNamed, TestBench } from '@kvtier/tiers/testing';
import { afterAll, afterEach, beforeEach, expect, it } from 'vitest';
import { type RedisServer, type ServerGroup, startCluster, until } from '../../infra/redis/servers.ts';

const payloadBytes = 20_000;
const space = namespaceNamed('one');
const many = Array.from({ length: 48 }, (_, i) => hashNamed(i));
type Hashes = typeof many;

let bench: TestBench;
let tier: RedisTier;
/** Of all tests that leave it whole. */
let cluster: ServerGroup;
let isWhole = false;
let victim: RedisServer;
/** Messages of the log. */
let lines: string[];
let open: RedisTier[];

beforeEach(async () => {
  bench = new TestBench();
  lines = [];
  open = [];
  if (!isWhole) cluster = await startCluster(3, 0);
  isWhole = true;
  victim = cluster.servers[0]!;
  for (const server of cluster.servers) {
    await server.cli('flushall');
    rmSync(join(server.dir, 'dump.rdb'), { force: true }); // or it would be there again after a start
    await server.cli('config', 'set', 'cluster-require-full-coverage', 'no');
  }
});
afterEach(async ({ task }) => {
  for (const each of open) each.checkIntegrity();
  await Promise.all(open.map((each) => each.close()));
  // Masters that are dead, or that a failed test has left in any state.
  isWhole &&= task.result?.state !== 'fail';
  if (!isWhole) await cluster.stop();
  bench.dispose();
});
afterAll(() => cluster.stop());

/** Where servers say nothing, whose time is waited out. */
const shortLimitMs = 2_500;

const openIt = async (timeLimitMs = 10_000, options: Partial<RedisTierOptions> = {}): Promise<RedisTier> => {
  const say = (_: object, message: string): void => void lines.push(message);
  const log = { info: say, warn: say, error: say };
  const settings = { mode: 'cluster', servers: cluster.urls, bytes: 24 << 20, partBytes: 32_768, timeLimitMs } as const;
  const opened = await openTier(bench, settings, { log, ...options });
  open.push(opened);
  return opened;
};

const partitionsOut = (): number => tier.stats().detail!.partitions_out!;
const heldOf = (hashes: Hashes): Hashes => hashes.filter((hash) => tier.lookup(space, [hash]) === 1);
const writeAll = async (hashes: Hashes): Promise<string[]> => await bench.write(tier, space, hashes, payloadBytes);
const all = (status: string, hashes: Hashes): string[] => hashes.map(() => status);
const told = (message: string): number => lines.filter((line) => line === message).length;
const [gone, back] = ['a partition is out of service', 'a partition is in service again'];

/** What the others hold is read and written; what would be the victim's is refused. */
async function othersGoOn(lost: Hashes): Promise<void> {
  const kept = many.filter((hash) => !lost.includes(hash));
  expect(lost.length).toBeGreaterThan(0);
  expect(kept.length).toBeGreaterThan(0);
  expect(heldOf(many)).toEqual(kept);
  expect(await bench.read(tier, space, kept, payloadBytes)).toEqual(all('ready', kept));
  expect(await bench.read(tier, space, lost, payloadBytes)).toEqual(all('missing', lost));
  expect(await writeAll(lost)).toEqual(all('refused', lost));
  expect(tier.remove(space, kept.slice(0, 4), 'asked')).toBe(4);
  expect(await writeAll(kept.slice(0, 4))).toEqual(all('stored', kept.slice(0, 4)));
  expect(tier.stats()).toMatchObject({ inService: true, blocks: kept.length });
  expect(tier.stats().outOfServiceReason).toMatch(/^\d+ of 16 partitions are out: redis: /);
}

it('a master that is killed costs its partitions; started again, what it has kept is listed, and it is written to', async () => {
  tier = await openIt();
  expect(await writeAll(many)).toEqual(all('stored', many));
  const kinds = new Set<string>();
  const removed = new Set<string>();
  tier.follow(({ kind, hashes }) => {
    kinds.add(kind);
    if (kind === 'removed') for (const hash of hashes) removed.add(hash);
  });
  await victim.cli('save');
  const its = Number(await victim.cli('eval', "return #redis.call('keys', '*:ledger')", '0'));
  expect(its).toBeGreaterThan(0);
  await victim.kill();
  await until(() => partitionsOut() === its, 'its partitions are out');
  await until(() => heldOf(many).length < many.length, 'its blocks are unlisted');
  const lost = many.filter((hash) => removed.has(hash));
  await othersGoOn(lost);
  expect([told(gone), told(back), kinds.has('cleared')]).toEqual([its, 0, false]);

  await victim.start();
  await until(() => partitionsOut() === 0, 'its partitions are back');
  expect(heldOf(many)).toEqual(many);
  expect(await bench.read(tier, space, many, payloadBytes)).toEqual(all('ready', many));
  expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: '', corrupt: 0 });
  const more = many.map((_, i) => hashNamed(`more ${i}`));
  expect(await writeAll(more)).toEqual(all('stored', more));
  expect([told(gone), told(back), kinds.has('cleared')]).toEqual([its, its, false]);
});

it('a master that says nothing (SIGSTOP) costs its partitions, and nobody waits for it any more; continued, it serves again', async () => {
  tier = await openIt(shortLimitMs);
  await until(async () => (await writeAll(many)).every((status) => status !== 'refused'), 'all are stored');
  const kinds = new Set<string>();
  tier.follow(({ kind }) => kinds.add(kind));
  const its = Number(await victim.cli('eval', "return #redis.call('keys', '*:ledger')", '0'));
  victim.signal('SIGSTOP');
  await until(() => partitionsOut() === its, 'its partitions are out');
  await until(() => tier.stats().blocks < many.length, 'its blocks are unlisted');
  await othersGoOn(many.filter((hash) => tier.lookup(space, [hash]) === 0));
  victim.signal('SIGCONT');
  await until(() => partitionsOut() === 0, 'its partitions are back');
  expect(heldOf(many)).toEqual(many);
  expect(await bench.read(tier, space, many, payloadBytes)).toEqual(all('ready', many));
  expect(kinds.has('cleared')).toBe(false);
});

it('a node that starts while a master is dead has the others at once, and this one when it is there', async () => {
  tier = await openIt();
  expect(await writeAll(many)).toEqual(all('stored', many));
  await victim.cli('save');
  await victim.kill();
  tier = await openIt(10_000, { openWithoutServer: true });
  await until(() => tier.stats().inService, 'in service');
  expect(partitionsOut()).toBeGreaterThan(0);
  await othersGoOn(many.filter((hash) => tier.lookup(space, [hash]) === 0));
  await victim.start();
  await until(() => partitionsOut() === 0, 'its partitions are there');
  expect(heldOf(many)).toEqual(many);
  expect(await bench.read(tier, space, many, payloadBytes)).toEqual(all('ready', many));
});

it('when the last partition goes, the tier is out of service and empty; with the first that is back it is in service', async () => {
  tier = await openIt();
  expect(await writeAll(many)).toEqual(all('stored', many));
  const kinds: string[] = [];
  await victim.kill();
  await until(() => partitionsOut() > 0, 'its partitions are out');
  tier.follow(({ kind }) => kinds.push(kind));
  await Promise.all(cluster.servers.map((server) => server.kill()));
  await until(() => !tier.stats().inService, 'out of service');
  expect(heldOf(many)).toEqual([]);
  expect(kinds).toContain('cleared');
  const others = cluster.servers.slice(1);
  await Promise.all(others.map((server) => server.start()));
  const cover = (server: RedisServer) => server.cli('config', 'set', 'cluster-require-full-coverage', 'no');
  await Promise.all(others.map(cover));
  await until(() => tier.stats().inService, 'in service');
  expect(partitionsOut()).toBeGreaterThan(0);
  await victim.start();
  await until(() => partitionsOut() === 0, 'all of them');
  expect(await writeAll(many)).toEqual(all('stored', many));
});

it('a master that cannot hold its share any more costs its partitions, also when all were lost meanwhile', async () => {
  tier = await openIt(shortLimitMs);
  await until(async () => (await writeAll(many)).every((status) => status !== 'refused'), 'all are stored');
  const its = Number(await victim.cli('eval', "return #redis.call('keys', '*:ledger')", '0'));
  await victim.cli('config', 'set', 'maxmemory', '1mb');
  for (const server of cluster.servers) server.signal('SIGSTOP');
  await until(() => !tier.stats().inService, 'out of service');
  for (const server of cluster.servers) server.signal('SIGCONT');
  await until(() => tier.stats().inService && partitionsOut() === its, 'the others are in service');
  expect(tier.stats().outOfServiceReason).toMatch(/whose maxmemory is 1048576; lower bytes or raise maxmemory$/);
  await othersGoOn(many.filter((hash) => tier.lookup(space, [hash]) === 0));
  await victim.cli('config', 'set', 'maxmemory', '0');
  await until(() => partitionsOut() === 0, 'all of them');
  expect(heldOf(many)).toEqual(many);
});

it('a directory that is gone costs its partition', async () => {
  tier = await openIt();
  expect(await writeAll(many)).toEqual(all('stored', many));
  const kinds = new Set<string>();
  tier.follow(({ kind }) => kinds.add(kind));
  const ledger = (await victim.cli('keys', '*:ledger')).split('\n')[0]!;
  const its = Number(await victim.cli('hget', ledger, 'count'));
  expect(its).toBeGreaterThan(0);
  await victim.cli('del', ledger);
  await until(() => told(back) === 1, 'it is made anew');
  expect(heldOf(many).length).toBe(many.length - its);
  expect([told(gone), kinds.has('cleared'), tier.stats().inService]).toEqual([1, false, true]);
  await until(async () => (await writeAll(many)).every((status) => status !== 'refused'), 'it is written to');
  expect(heldOf(many)).toEqual(many);
});

it('a node that ends while a master is dead ends', async () => {
  tier = await openIt();
  isWhole = false;
  await victim.kill();
  await until(() => partitionsOut() > 0, 'its partitions are out');
  await tier.close();
  expect(tier.stats().inService).toBe(false);
});

/**
 * Whole nodes under load while Redis is killed, stopped, or fails over: no request fails, no wrong block is served, the servers
 * themselves never hold more than the budget, and blocks come from Redis again without a restart.
 */
import { byLaw } from '@kvtier/tiers/testing';
import { afterEach, expect, it } from 'vitest';
import { RedisServer, startCluster } from '../../infra/redis/servers.ts';
import { heldBytes, watch } from './held-bytes.ts';
import { NodeLoad, Pair, tierOf } from './node-load.ts';
import { NodeRig } from './node-rig.ts';

const bytes = 16 << 20;
/** 32 chains of 8 blocks of 100 kB: more than the arenas and more than the budget. */
const chains = 32;
let pair: Pair | undefined;
let stopServers: (() => Promise<void>) | undefined;
afterEach(async () => {
  await pair?.dispose();
  await stopServers?.();
  pair = undefined;
  stopServers = undefined;
});

async function open(redis: object): Promise<Pair> {
  pair = new Pair(new NodeRig({ diskBytes: null }), new NodeRig({ diskBytes: null }));
  const config = { redis: { bytes, timeLimitMs: 1_000, ...redis }, arena: { bytes: 4 << 20 } };
  await Promise.all([pair.a.start({ config }), pair.b.start({ config })]);
  return pair;
}

it('one server: killed, started again, stopped, continued', async () => {
  const server = await RedisServer.start();
  stopServers = () => server.stop();
  const nodes = await open({ servers: [server.url] });
  const load = new NodeLoad(await nodes.engines(), chains);
  const held = watch(() => [server]);
  const isInService = async (): Promise<boolean> =>
    (await tierOf(nodes.askA!, 'redis')).inService && (await tierOf(nodes.askB!, 'redis')).inService;
  await load.servedFrom('redis');

  await server.kill();
  await load.until(async () => !(await isInService()), 'out of service');
  await load.more(30);
  await server.start();
  await load.until(isInService, 'in service');
  await load.servedFrom('redis');

  server.signal('SIGSTOP');
  await load.until(async () => !(await isInService()), 'out of service');
  await load.more(20);
  server.signal('SIGCONT');
  await load.until(isInService, 'in service');
  await load.servedFrom('redis');
  await load.stop();
  const most = await held.end();
  expect(most).toBeGreaterThan(bytes / 4);
  byLaw(3, () => expect(most).toBeLessThanOrEqual(bytes));
  for (const engine of [nodes.askA!, nodes.askB!]) expect((await tierOf(engine, 'redis')).corrupt).toBe(0n);
});

it('a Cluster: a master is killed, its replica takes over', async () => {
  const cluster = await startCluster();
  stopServers = () => cluster.stop();
  const masters = cluster.servers.slice(0, 3);
  const nodes = await open({ mode: 'cluster', servers: cluster.urls, partitions: 6 });
  const load = new NodeLoad(await nodes.engines(), chains);
  await load.servedFrom('redis');
  await load.more(20);
  await masters[0]!.kill();
  const rest = cluster.servers.filter((server) => server !== masters[0]);
  const isMaster = async (server: RedisServer): Promise<boolean> => (await server.cli('role')).startsWith('master');
  await load.until(async () => (await Promise.all(rest.map(isMaster))).filter(Boolean).length === 3, 'the failover');
  await load.more(20);
  await load.until(
    async () => (await tierOf(nodes.askA!, 'redis')).inService && (await tierOf(nodes.askB!, 'redis')).inService,
    'in service',
  );
  await load.servedFrom('redis');
  await load.stop();
  const roles = await Promise.all(rest.map(isMaster));
  const now = rest.filter((_, index) => roles[index]);
  const heldNow = await heldBytes(now);
  byLaw(3, () => expect(heldNow).toBeLessThanOrEqual(bytes));
});

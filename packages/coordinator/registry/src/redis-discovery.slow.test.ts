/** Discovery through a list in Redis: the conformance suite against real servers of each kind. */
import type { MemberServers } from '@kvtier/config';
import { type Announced, announceNode, announceWorker } from '@kvtier/membership';
import { Lines, memberServers } from '@kvtier/membership/testing';
import { afterAll, beforeAll, describe } from 'vitest';
import { RedisServer, type ServerGroup, startCluster, startSentinel } from '../../../../infra/redis/servers.ts';
import { createDiscovery } from './index.ts';
import { discoveryConformance, type Source } from './testing/discovery-conformance.ts';

let group: ServerGroup;
let count = 0;

async function makeSource(redis: MemberServers): Promise<Source> {
  const members = new Map<string, Announced[]>();
  const leave = async (name: string): Promise<void> => {
    await Promise.all(members.get(name)?.map((each) => each.close()) ?? []);
    members.delete(name);
  };
  const options = (log: Lines) => ({ redis, leaseMs: 1_500, log });
  const first = group.servers[0]!;
  return {
    open: (log) => createDiscovery({ kind: 'redis', redis, pollMs: 50 }, log),
    join: async (worker, node) => {
      await leave(worker.name);
      const log = new Lines();
      const all = [announceWorker(worker, options(log))];
      members.set(worker.name, all);
      await log.until(/announced to the cluster .*worker:/);
      if (node === undefined) return;
      all.push(announceNode(node, options(log)));
      await log.until(/announced to the cluster .*node:/);
    },
    drain: async (name) => void (await members.get(name)![0]!.drain(10_000)),
    leave,
    twin: async (worker, log) => {
      members.get(worker.name)!.push(announceWorker({ ...worker, role: 'decode' }, options(log)));
      await log.until(/not announced to the cluster/);
    },
    nonsense: async (name) => {
      const at = `${redis.keyPrefix}{members}:`;
      const cli = (...words: string[]) => first.cli(...(redis.mode === 'cluster' ? ['-c'] : []), ...words);
      await cli('hset', `${at}records`, `worker:${name}`, `${'0'.repeat(32)}{"name":"${name}"}`);
      await cli('zadd', `${at}leases`, String(Date.now() + 9_000), `worker:${name}`);
      await cli('set', `${at}version`, 'another');
    },
    ...(redis.mode === 'single' ? { outage: { down: () => first.kill(), up: () => first.start() } } : {}),
    close: async () => {
      await Promise.all([...members.keys()].map(leave));
    },
  };
}

describe.each(['single', 'sentinel', 'cluster'] as const)('redis discovery, %s', (mode) => {
  beforeAll(async () => {
    if (mode === 'sentinel') group = await startSentinel();
    else if (mode === 'cluster') group = await startCluster(3, 0);
    else {
      const server = await RedisServer.start();
      group = { urls: [server.url], servers: [server], stop: () => server.stop() };
    }
  });
  afterAll(async () => {
    await group.stop();
  });
  discoveryConformance(() => makeSource(memberServers(group.urls, mode, `c${++count}:`)));
});

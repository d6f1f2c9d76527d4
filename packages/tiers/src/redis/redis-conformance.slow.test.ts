/** The one suite over real servers: one, with TLS and an ACL user, a Cluster, and a master under Sentinels. */
import { afterAll, beforeAll, describe } from 'vitest';
import {
  aclRules,
  RedisServer,
  type ServerGroup,
  startCluster,
  startSentinel,
  startTls,
} from '../../../../infra/redis/servers.ts';
import { tierConformance } from '../conformance.ts';
import { openTier } from '../testing/redis.ts';
import type { RedisSettings } from './settings.ts';

interface Kind {
  readonly settings: Partial<RedisSettings>;
  readonly group: ServerGroup;
}

const kinds: Record<string, () => Promise<Kind>> = {
  'one server': async () => {
    const server = await RedisServer.start();
    return { group: { urls: [server.url], servers: [server], stop: () => server.stop() }, settings: {} };
  },
  'TLS and an ACL user': async () => {
    const group = await startTls(aclRules('kvtier:'));
    return { group, settings: { username: 'kvtier', password: 'secret', tls: { caFile: group.caFile } } };
  },
  'a Cluster of three': async () => {
    const group = await startCluster(3, 0);
    return { group, settings: { mode: 'cluster', partitions: 3, bytes: 6 << 20 } };
  },
  Sentinels: async () => ({ group: await startSentinel(), settings: { mode: 'sentinel', masterName: 'kvtier' } }),
};

describe.each(Object.entries(kinds))('%s', (name, start) => {
  let kind: Kind;
  beforeAll(async () => {
    kind = await start();
  });
  afterAll(() => kind.group.stop());

  tierConformance(
    `redis, ${name}`,
    async (bench) => {
      for (const server of kind.group.servers.filter(({ program }) => program === 'redis-server')) {
        await server.cli('flushall').catch(() => ''); // a replica may not, and follows its master
      }
      return openTier(bench, { servers: kind.group.urls, ...kind.settings });
    },
    { persistent: true, runs: 3 },
  );
});

/**
 * The one suite over real servers: one with TLS and a user who may do no more than docs/operating.md lists, and a Cluster. One without
 * either is what redis-tier.slow.test.ts stands on; Sentinels fail over in test/faults/redis-server.slow.test.ts.
 */
import { afterAll, beforeAll, describe } from 'vitest';
import { aclRules, type ServerGroup, startCluster, startTls } from '../../../../../infra/redis/servers.ts';
import { tierConformance } from '../kit/testing/conformance.ts';
import type { RedisSettings } from './settings.ts';
import { openTier } from './testing/redis.ts';

interface Kind {
  readonly settings: Partial<RedisSettings>;
  readonly group: ServerGroup;
}

const kinds: Record<string, () => Promise<Kind>> = {
  'TLS and an ACL user': async () => {
    const group = await startTls(aclRules('kvtier:'));
    return { group, settings: { username: 'kvtier', password: 'secret', tls: { caFile: group.caFile } } };
  },
  'a Cluster of three': async () => {
    const group = await startCluster(3, 0);
    return { group, settings: { mode: 'cluster', partitions: 3, bytes: 6 << 20 } };
  },
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
      await Promise.all(kind.group.servers.map((server) => server.cli('flushall')));
      return openTier(bench, { servers: kind.group.urls, ...kind.settings });
    },
    { persistent: true, runs: 3 },
  );
});

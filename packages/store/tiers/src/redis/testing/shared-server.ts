/** One Redis server for all tests of a file, emptied before each, and the tiers over it: whole and closed after each. */
import { afterAll, afterEach, beforeAll, beforeEach } from 'vitest';
import { RedisServer } from '../../../../../../infra/redis/servers.ts';
import { TestBench } from '../../kit/testing/objects.ts';
import type { RedisTier } from '../redis-tier.ts';
import { openTier } from './redis.ts';

export interface SharedServer {
  server: RedisServer;
  bench: TestBench;
  /** Those that the test has opened. */
  tiers: RedisTier[];
  open(
    settings?: Partial<Parameters<typeof openTier>[1]>,
    options?: Parameters<typeof openTier>[2],
  ): Promise<RedisTier>;
}

/** Begins and ends with the hooks of the file, or of the `describe`, that calls it. */
export function sharedServer(): SharedServer {
  const shared = {
    tiers: [] as RedisTier[],
    async open(settings = {}, options = {}) {
      const tier = await openTier(shared.bench, { servers: [shared.server.url], ...settings }, options);
      shared.tiers.push(tier);
      return tier;
    },
  } as SharedServer;
  beforeAll(async () => {
    shared.server = await RedisServer.start();
  });
  afterAll(() => shared.server.stop());
  beforeEach(async () => {
    await shared.server.cli('flushall');
    shared.bench = new TestBench();
    shared.tiers = [];
  });
  afterEach(async () => {
    for (const tier of shared.tiers) tier.checkIntegrity();
    await Promise.all(shared.tiers.map((tier) => tier.close()));
    shared.bench.dispose();
  });
  return shared;
}

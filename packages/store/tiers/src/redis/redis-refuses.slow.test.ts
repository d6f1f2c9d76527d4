/** A server that answers and takes no writes: without memory, without replicas. What it holds is served, also to who comes anew. */
import { beforeEach, expect, it } from 'vitest';
import { type RedisServer, until } from '../../../../../infra/redis/servers.ts';
import { hashNamed, namespaceNamed, type TestBench } from '../kit/testing/objects.ts';
import type { RedisTier } from './redis-tier.ts';
import { sharedServer } from './testing/shared-server.ts';

const payloadBytes = 20_000;
const space = namespaceNamed('one');
const chain = Array.from({ length: 60 }, (_, i) => hashNamed(i));
const ready = chain.map(() => 'ready');

const shared = sharedServer();
const { open } = shared;
let server: RedisServer;
let bench: TestBench;
beforeEach(() => {
  ({ server, bench } = shared);
});

/** What the nodes that write to it log but for news. */
const lines: string[] = [];
const note = (_: unknown, line: string): void => void lines.push(line);
const log = { info: () => {}, error: note, warn: note };
beforeEach(() => {
  lines.length = 0;
});

const memoryUsed = async (): Promise<number> =>
  Number(/used_memory:(\d+)/.exec(await server.cli('info', 'memory'))?.[1]);

const states = {
  'without memory': {
    begin: async () => {
      await server.cli('eval', "redis.call('set', 'stranger', string.rep('x', 30000000))", '0');
      await server.cli('config', 'set', 'maxmemory', String((await memoryUsed()) - 1_000_000));
    },
    end: () => server.cli('config', 'set', 'maxmemory', '0'),
    word: 'OOM',
  },
  'without a replica that it must have': {
    begin: () => server.cli('config', 'set', 'min-replicas-to-write', '1'),
    end: () => server.cli('config', 'set', 'min-replicas-to-write', '0'),
    word: 'NOREPLICAS',
  },
} as const;

const readsAll = (tier: RedisTier): Promise<unknown> => bench.read(tier, space, chain, payloadBytes);

it.each(['without memory', 'without a replica that it must have'] as const)(
  '%s: nodes that start or lost their connection read all that it holds',
  async (name) => {
    const { begin, end, word } = states[name];
    const one = await open({}, { log });
    await bench.write(one, space, chain, payloadBytes);
    await begin();
    try {
      expect(await server.cli('set', 'a', 'b')).toContain(word);
      const two = await open();
      expect([two.stats().inService, two.lookup(space, chain)]).toEqual([true, chain.length]);
      expect(await readsAll(two)).toEqual(ready);
      expect(await bench.write(two, space, [hashNamed('a new one')], payloadBytes)).toEqual(['refused']);
      await server.cli('client', 'kill', 'type', 'normal');
      await until(() => lines.includes('the redis tier is out of service'), 'the cut');
      await until(() => one.stats().inService && one.lookup(space, chain) === chain.length, 'service after the cut');
      expect(await readsAll(one)).toEqual(ready);
    } finally {
      await end();
    }
    expect(await bench.write(one, space, [hashNamed('a new one')], payloadBytes)).toEqual(['stored']);
  },
);

it('without memory: a smaller budget is taken, and frees what is over it', async () => {
  const one = await open();
  await bench.write(one, space, chain, payloadBytes);
  await states['without memory'].begin();
  try {
    const two = await open({ bytes: 1 << 20 }, { log });
    expect(two.stats().capacityBytes).toBe(1 << 20);
    const kept = two.stats().blocks;
    expect(kept).toBeGreaterThan(0);
    expect(kept).toBeLessThan(chain.length);
    const lua = `local sum = 0
      for _, key in ipairs(redis.call('KEYS', 'kvtier:{p0}:v:*')) do sum = sum + redis.call('STRLEN', key) end
      return sum`;
    expect(Number(await server.cli('eval', lua, '0'))).toBe(kept * (payloadBytes + 256));
    await until(() => one.stats().blocks === kept, 'the other node');
    expect(lines).toEqual([]);
  } finally {
    await states['without memory'].end();
  }
});

it('without a replica that it must have: another budget is not taken, and the node says so', async () => {
  const one = await open();
  await bench.write(one, space, chain, payloadBytes);
  await states['without a replica that it must have'].begin();
  try {
    const two = await open({ bytes: 1 << 20 }, { log });
    expect([two.stats().capacityBytes, two.stats().blocks]).toEqual([2 << 20, chain.length]);
    expect(lines).toEqual(['the budget is not the one of this configuration']);
  } finally {
    await states['without a replica that it must have'].end();
  }
});

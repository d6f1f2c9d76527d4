/**
 * Two hosts' worth of engines: two workers of the demo model, each with a cache node of its own, that share one Redis. What one has
 * computed the other loads; and while Redis and the nodes are killed and stopped under load, every greedy answer equals that of an
 * engine without a tier, no request fails, and Redis keeps to its budget.
 */
import { byLaw } from '@kvtier/tiers/testing';
import type { EngineClient } from '@kvtier/wire/grpc';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { RedisServer } from '../../infra/redis/servers.ts';
import { ask, describe, EngineRig, metricsText, resetPrefixCache, until } from './engine-rig.ts';
import { watch } from './held-bytes.ts';

/** Less than half of what the tables come to. */
const redisBytes = 12 << 20;
const tables = 12;
let redis: RedisServer;
let a: EngineRig;
let b: EngineRig;
let judge: EngineClient;
let clients: EngineClient[];

beforeAll(async () => {
  redis = await RedisServer.start();
  const shared = { disk: null, redis: { servers: [redis.url], bytes: redisBytes, timeLimitMs: 1_000 } };
  a = new EngineRig(shared);
  b = new EngineRig(shared);
  await Promise.all([a.node.start(), b.node.start(), a.worker.start(), b.worker.start(), a.judge.start()]);
  clients = [a.client('worker'), b.client('worker')];
  judge = a.client('judge');
  for (const client of clients) await attached(client);
}, 180_000);
afterAll(async () => {
  redis?.signal('SIGCONT');
  await Promise.all([a?.close(), b?.close()]);
  await redis?.stop();
  expect([...a.arenas(), ...b.arenas()], 'arena files left behind').toEqual([]);
});

const attached = (client: EngineClient) =>
  until(async () => (await describe(client)).tierAttached, 'the session', 60_000);

/** A figure of the worker's metrics, by its name and label there. */
async function metric(client: EngineClient, name: string): Promise<number> {
  const line = (await metricsText(client)).split('\n').find((each) => each.startsWith(`kvtier_${name} `));
  return Number(line?.split(' ')[1] ?? 0);
}
const isInService = async (): Promise<boolean> =>
  (await Promise.all(clients.map((client) => metric(client, 'tier_in_service{tier="redis"}')))).every(
    (one) => one === 1,
  );

async function check(client: EngineClient, table: number, row: number): Promise<Awaited<ReturnType<typeof ask>>> {
  const prompt = a.prompt(table, row);
  const [answer, right] = await Promise.all([ask(client, prompt), a.right(judge, prompt)]);
  byLaw(1, () => expect(answer.tokenIds).toEqual(right));
  return answer;
}

/** Never the same twice, also in a second attempt of a test. */
let nextTable = 100;

/** What the worker and its node say of blocks that were not written to Redis. */
async function whyUnwritten(client: EngineClient): Promise<string> {
  const names = /^kvtier_(node_events\{event="(writedown\.redis|reserve)\.|connector_reasons_total\{)/;
  return (await metricsText(client))
    .split('\n')
    .filter((line) => names.test(line))
    .join('\n');
}

/**
 * Worker A computes a table; when B, which never saw it, asks for it, B's node finds it in Redis: it, or one of the next, should
 * B hear of it late. Whether B then loads or computes is the planner's: on a fast machine computing may win.
 */
async function checkShared(): Promise<void> {
  const [client, other] = clients as [EngineClient, EngineClient];
  await until(isInService, 'Redis in service', 60_000);
  const stored = (): Promise<number> => metric(client, 'node_events{event="writedown.redis.stored"}');
  const hits = (): Promise<number> => metric(other, 'tier_hits{tier="redis"}');
  const endMs = performance.now() + 60_000;
  for (;;) {
    const table = nextTable++;
    const mustBe = (await stored()) + Math.floor(a.prompt(table, 1).length / 16) - 3;
    await check(client, table, 1);
    for (let seconds = 10; (await stored()) < mustBe; seconds += 10) {
      if (seconds > 60) throw new Error(`not written to Redis within a minute:\n${await whyUnwritten(client)}`);
      await until(async () => (await stored()) >= mustBe, 'the blocks in Redis', 10_000).catch(() => {});
      // What a busy node refused is offered again when it is used again.
      if ((await stored()) < mustBe) await check(client, table, 1);
    }
    const before = await hits();
    const { cache } = await check(other, table, 2);
    if ((await hits()) > before || (cache!.tokensByTier.redis ?? 0) > 0) return;
    expect(performance.now(), 'nothing is shared').toBeLessThan(endMs);
  }
}

it('what one worker computed, the other finds in Redis, and answers the same', async () => {
  await checkShared();
});

it('Redis and nodes are killed and stopped under load: every answer is right, and they share again', async () => {
  const held = watch(() => [redis]);
  let answers = 0;
  let running = true;
  const user = async (client: EngineClient, number: number): Promise<void> => {
    for (let turn = number; running; turn++) {
      await check(client, 10 + ((turn * 5) % tables), turn % 8);
      if (turn % 3 === 0) await resetPrefixCache(client); // so that prefixes come from the tier
      answers++;
    }
  };
  const users = clients.flatMap((client, at) => [user(client, at), user(client, at + 2)]);
  const failed = Promise.all(users);
  failed.catch(() => {}); // awaited below
  const more = async (count: number): Promise<void> => {
    const end = answers + count;
    await Promise.race([until(async () => answers >= end, `${count} answers`, 90_000), failed]);
  };
  try {
    await more(8);
    await redis.kill();
    await more(8);
    await redis.start();
    await more(4);
    await a.node.signal('SIGKILL');
    await more(8);
    await a.node.start();
    redis.signal('SIGSTOP');
    await more(8);
    redis.signal('SIGCONT');
    await b.node.signal('SIGSTOP');
    await more(8);
    await b.node.signal('SIGCONT');
    await more(4);
  } finally {
    running = false;
    await failed;
  }
  for (const client of clients) await attached(client);
  await checkShared();
  const most = await held.end();
  expect(most).toBeGreaterThan(0);
  byLaw(3, () => expect(most).toBeLessThanOrEqual(redisBytes));
});

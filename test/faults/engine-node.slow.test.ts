/**
 * The engine worker while its cache node is killed, stopped and restarted: requests go on, their greedy outputs equal
 * those of an engine without a tier, and the session returns by itself.
 */
import { closeSync, fstatSync, openSync, writeSync } from 'node:fs';
import { byLaw } from '@kvtier/tiers/testing';
import type { EngineClient } from '@kvtier/wire/grpc';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { ask, describe, EngineRig, metricsText, resetPrefixCache, until } from './engine-rig.ts';

let rig: EngineRig;
let client: EngineClient;
let judge: EngineClient;

beforeAll(async () => {
  rig = new EngineRig();
  rig.worker.configure({ loads: 'always', loadDeadlineMs: patientMs }); // whatever is faster on this machine now
  await Promise.all([rig.node.start(), rig.worker.start(), rig.judge.start()]);
  client = rig.client('worker');
  judge = rig.client('judge');
  await attached();
});
afterAll(async () => {
  await rig.close();
  expect(rig.arenas(), 'arena files left behind').toEqual([]);
});

/** A load ends by then; that a busy machine is late with one is nothing to see here, but where the node stands still. */
const patientMs = 20_000;
async function restartedWith(settings: object): Promise<void> {
  rig.worker.configure(settings);
  await rig.worker.signal('SIGTERM');
  await rig.worker.start();
  await attached();
}

const attached = () => until(async () => (await describe(client)).tierAttached, 'the session');
/** Everything on its way to the tier has arrived there. */
const stored = () =>
  until(async () => /kvtier_connector_storing_blocks 0/.test(await metricsText(client)), 'stores to be confirmed');
const written = () =>
  until(async () => {
    const text = await metricsText(client);
    const blocks = (tier: string): number =>
      Number(new RegExp(`tier_blocks\\{tier="${tier}"\\} (\\d+)`).exec(text)?.[1]);
    return blocks('disk') >= blocks('arena');
  }, 'the arena to be on disk');
/**
 * All blocks of a prompt are in the tier, and the pool is empty: what a busy node gave no room in time is offered again when it is computed
 * again. Returns what the first answer found.
 */
async function storedWhole(table: number, row: number): Promise<Awaited<ReturnType<typeof ask>>> {
  const wholeTokens = 16 * Math.floor((rig.prompt(table, row).length - 1) / 16);
  const first = await check(table, row);
  const isWhole = async (): Promise<boolean> => {
    await stored();
    await reset();
    return (await check(table, row)).cache!.cachedTokens >= wholeTokens;
  };
  await until(isWhole, 'all blocks to be held', 60_000);
  await reset();
  return first;
}
/** Tokens that it has had from the arena. */
const fromArena = async (): Promise<number> =>
  Number(/kvtier_engine_cached_tokens_total\{tier="arena"\} (\d+)/.exec(await metricsText(client))?.[1] ?? 0);
const reset = () => until(() => resetPrefixCache(client), 'blocks to come back');

async function check(table: number, row: number): Promise<Awaited<ReturnType<typeof ask>>> {
  const prompt = rig.prompt(table, row);
  const [answer, right] = await Promise.all([ask(client, prompt), rig.right(judge, prompt)]);
  byLaw(1, () => expect(answer.tokenIds).toEqual(right));
  return answer;
}

it('a prefix that left the pool comes back from the tier, and the answer is the same', async () => {
  const cold = await storedWhole(1, 3);
  expect(cold.cache).toMatchObject({ cachedTokens: 0, tokensByTier: {} });
  const before = await fromArena();
  const warm = await check(1, 7);
  const blocks = Math.floor(rig.prompt(1, 7).length / 16);
  expect(warm.cache!.cachedTokens).toBeGreaterThanOrEqual(16 * (blocks - 3));
  expect(warm.cache!.tokensByTier).toEqual({ arena: warm.cache!.cachedTokens });
  await until(async () => (await fromArena()) === before + warm.cache!.cachedTokens, 'what it has served to be told');
  const text = await metricsText(client);
  expect(text).toContain('kvtier_connector_attached 1');
  expect(text).toMatch(/kvtier_tier_blocks\{tier="arena"\} [1-9]/);
});

it('the node is killed and started again: from disk, and no request failed', async () => {
  await storedWhole(2, 1);
  await written();
  await rig.node.signal('SIGKILL');
  await check(2, 2); // computed, or from the pool: nobody waits for a dead node
  await rig.node.start();
  await attached();
  await reset();
  const { cache } = await check(2, 9);
  expect(cache!.cachedTokens, await metricsText(client)).toBeGreaterThan(0);
  expect(Object.keys(cache!.tokensByTier)).toContain('disk');
});

it('a node that is stopped costs a request no more than a moment, and is used again when it goes on', async () => {
  await restartedWith({ loadDeadlineMs: 2_000 });
  await storedWhole(3, 1);
  await rig.node.signal('SIGSTOP');
  for (let row = 2; row < 6; row++) {
    const startedAtMs = performance.now();
    await check(3 + row, row);
    expect(performance.now() - startedAtMs).toBeLessThan(15_000);
  }
  // What nobody holds is not asked for: that the node is silent shows in what it does not take.
  await until(async () => !(await describe(client)).tierAttached, 'the silent node to be left');
  await rig.node.signal('SIGCONT');
  await attached();
  const isUsed = async (): Promise<boolean> => {
    await reset();
    return (await check(3, 8)).cache!.cachedTokens > 0;
  };
  await until(isUsed, 'blocks of the node that goes on');
  await restartedWith({ loadDeadlineMs: patientMs });
});

it('bytes that changed in the arena are noticed, reported and computed anew', async () => {
  await storedWhole(7, 1);
  const [arena] = rig.arenas();
  const file = openSync(arena!, 'r+');
  const { size } = fstatSync(file);
  for (let at = 8192; at < size; at += 32_768) writeSync(file, Buffer.from([0x5a, 0xa5]), 0, 2, at);
  closeSync(file);
  const { cache } = await check(7, 2);
  expect(cache!.cachedTokens).toBe(0);
  expect(await metricsText(client)).toMatch(/connector_reasons_total\{reason="load: checksum"\} [1-9]/);
  await storedWhole(7, 2); // removed, and stored anew
});

it('the worker is killed while it loads and stores: its slots come back, and a new one answers right', async () => {
  for (let round = 0; round < 3; round++) {
    const fates = [0, 1, 2].map((row) => ask(client, rig.prompt(10 + round, row)).catch(() => undefined));
    await new Promise((resolve) => setTimeout(resolve, 30 + round * 60));
    await rig.worker.signal('SIGKILL');
    await Promise.all(fates);
    await rig.worker.start();
    await attached();
    await check(10 + round, 5);
  }
  await until(
    async () => /kvtier_node_events\{event="quarantine.open"\} 0/.test(await metricsText(client)),
    'quarantine',
  );
});

it('requests run on while the node is killed, stopped and restarted at random moments', async () => {
  let stop = false;
  const storm = (async () => {
    for (let round = 0; round < 8; round++) {
      await new Promise((resolve) => setTimeout(resolve, 150 + Math.random() * 700));
      if (round % 2 === 0) {
        await rig.node.signal('SIGKILL');
        await new Promise((resolve) => setTimeout(resolve, Math.random() * 300));
        await rig.node.start();
      } else {
        await rig.node.signal('SIGSTOP');
        await new Promise((resolve) => setTimeout(resolve, Math.random() * 800));
        await rig.node.signal('SIGCONT');
      }
    }
    stop = true;
  })();
  let answers = 0;
  const user = async (number: number): Promise<void> => {
    for (let i = 0; !stop || i < 3; i++) {
      await check(20 + ((number + i) % 5), (number * 7 + i) % 40);
      answers++;
    }
  };
  await Promise.all([storm, user(0), user(1), user(2)]);
  expect(answers).toBeGreaterThan(8);
  await attached();
  await reset();
  await storedWhole(20, 0);
  expect((await check(20, 1)).cache!.cachedTokens).toBeGreaterThan(0);
});

/**
 * A prompt that one worker computes and another one answers, as real processes: over two cache nodes that are peers, and over one.
 * Answers are those of a worker alone, also when the prefill worker is killed in the middle, when the wait is called off, and when
 * the caller leaves; nothing stays behind.
 */
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { loadTokenizer } from '@kvtier/api-server';
import { DemoTable } from '@kvtier/cli';
import { greedy } from '@kvtier/registry/testing';
import {
  type CacheUse,
  channelOptions,
  clientCredentials,
  EngineClient,
  fromFailure,
  fromStatus,
  type GenerateEvent,
  type GenerateRequest,
  type HandOffState,
} from '@kvtier/wire/grpc';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { freePort } from '../../infra/ports.ts';
import { CpuWaits } from '../e2e/cpu-waits.ts';
import { ask, describe, metricsText, modelDir, Service, until } from './engine-rig.ts';

const blockTokens = 16;
const folder = mkdtempSync(join(tmpdir(), 'kvtier-hand-off-'));
const tokenizer = loadTokenizer(modelDir);
const patience = { stallMs: 20_000, deadlineMs: 40_000 };
const clients: EngineClient[] = [];
let services: Record<'nodeP' | 'nodeD' | 'prefill' | 'decode' | 'beside' | 'judge', Service>;
let prefill: EngineClient;
let decode: EngineClient;
/** At the prefill worker's node. */
let beside: EngineClient;
let judge: EngineClient;

beforeAll(async () => {
  const places = [await freePort(), await freePort()].map((port) => ({ host: '127.0.0.1', port }));
  const secretFile = join(folder, 'secret');
  writeFileSync(secretFile, 'x'.repeat(48), { mode: 0o600 });
  const security = { encryption: 'none', secretFile, trustedNetwork: true };
  const node = (name: string, own: number): Service =>
    new Service('cache-node', {
      socketPath: join(folder, name, 's'),
      dataDir: join(folder, name, 'data'),
      ...{ arena: { bytes: 64 << 20 }, disk: null, logLevel: 'warn' },
      peers: { listen: places[own]!, peers: [places[1 - own]!], security, readLimitMs: 1_000 },
    });
  const worker = (name: string, nodeName: string | null, more: object = {}): Service =>
    new Service('engine-worker', {
      ...{ modelDir, servedName: 'demo', listen: `unix:${join(folder, name)}`, kvBytes: 32 << 20, threads: 1 },
      cacheNodeSocket: nodeName && join(folder, nodeName, 's'),
      ...{ maxSequences: 8, logLevel: 'warn', ...more },
    });
  services = {
    nodeP: node('p', 0),
    nodeD: node('d', 1),
    // Small steps: a prompt takes many of them, and something can happen in between.
    prefill: worker('prefill', 'p', { maxStepTokens: 32 }),
    decode: worker('decode', 'd'),
    beside: worker('beside', 'p'),
    judge: worker('judge', null),
  };
  await Promise.all(Object.values(services).map((service) => service.start()));
  const clientOf = (name: string): EngineClient => {
    const address = `unix:${join(folder, name)}`;
    const client = new EngineClient(address, clientCredentials(address), channelOptions);
    clients.push(client);
    return client;
  };
  [prefill, decode, beside, judge] = [clientOf('prefill'), clientOf('decode'), clientOf('beside'), clientOf('judge')];
  for (const client of [prefill, decode, beside])
    await until(async () => (await describe(client)).tierAttached, 'the session');
  // The nodes know each other: what one commits the other one lists.
  await ask(prefill, promptOf(99), 1);
  await until(async () => /tier_blocks\{tier="peer"\} [1-9]/.test(await metricsText(decode)), 'the first announcement');
}, 60_000);

afterAll(async () => {
  for (const client of clients) client.close();
  const { nodeP, nodeD, ...workers } = services;
  await Promise.all(Object.values(workers).map((service) => service.signal('SIGTERM')));
  await Promise.all([nodeP, nodeD].map((service) => service.signal('SIGTERM')));
  const arenas = [nodeP, nodeD].flatMap(({ ready }) => ready.map(({ arenaPath }) => String(arenaPath)));
  expect(arenas.filter(existsSync), 'arena files left behind').toEqual([]);
  rmSync(folder, { recursive: true, force: true });
});

/** Long ones are still being computed when the test gets its turn. */
const [shortRows, longRows] = [40, 300];
const promptOf = (table: number, rows = shortRows): number[] =>
  tokenizer.encode(new DemoTable(rows, 2_000 + table).question(3, 'age').prompt, { addSpecialTokens: false });
const blocksOf = (prompt: readonly number[]): number => Math.floor((prompt.length - 1) / blockTokens);

interface Run {
  readonly states: HandOffState[];
  readonly tokenIds: number[];
  readonly ended: Promise<{ finishReason: string; cache: CacheUse | undefined }>;
  cancel(): void;
}

function begin(client: EngineClient, requestId: string, fields: Partial<GenerateRequest>): Run {
  const { promptTokenIds = [] } = fields;
  const call = client.generate({ ...greedy({ requestId, promptTokenIds, maxTokens: 6 }), ...fields });
  const states: HandOffState[] = [];
  const tokenIds: number[] = [];
  const ended = new Promise<{ finishReason: string; cache: CacheUse | undefined }>((resolve, reject) => {
    let finishReason = '';
    let cache: CacheUse | undefined;
    call.on('data', (event: GenerateEvent) => {
      if (event.failure) reject(fromFailure(event.failure));
      if (event.handOff) states.push(event.handOff);
      tokenIds.push(...event.tokenIds);
      finishReason = event.finishReason;
      cache ??= event.cache;
    });
    call.on('error', (error) => reject(fromStatus(error)));
    call.on('end', () => resolve({ finishReason, cache }));
  });
  ended.catch(() => {});
  return { states, tokenIds, ended, cancel: () => call.cancel() };
}

const reserved = (run: Run) => until(async () => run.states.length > 0, 'its room');
const change = (client: EngineClient, requestId: string, blocks: number) =>
  new Promise<boolean>((resolve, reject) =>
    client.changeHandOff({ requestId, blocks }, (error, answer) =>
      error ? reject(fromStatus(error)) : resolve(answer.done),
    ),
  );
const outcomes = async (client: EngineClient, outcome: string): Promise<number> =>
  Number(new RegExp(`hand_offs_total\\{outcome="${outcome}"\\} (\\d+)`).exec(await metricsText(client))?.[1] ?? 0);
/** Nobody holds a block. */
const empty = async (client: EngineClient): Promise<boolean> => {
  const text = await metricsText(client);
  const of = (name: string): number => Number(new RegExp(`kvtier_engine_${name} (\\d+)`).exec(text)?.[1]);
  return of('free_blocks') === of('block_count') - 1;
};

it.each([
  ['two nodes that are peers', () => decode, 1],
  ['one node', () => beside, 2],
])('over %s: computed there, answered here, as by one alone', async (_, decodeWorker, table) => {
  const promptTokenIds = promptOf(table);
  const blocks = blocksOf(promptTokenIds);
  const answer = begin(decodeWorker(), 'a', { promptTokenIds, handOff: { blocks, ...patience } });
  await reserved(answer);
  expect(answer.states).toEqual([{ localBlocks: 0, readyBlocks: 0 }]);
  // Of two answers one gets its first token from the prefill worker: the same, before anything else.
  const draws = table === 2;
  const leg = begin(prefill, 'a', { promptTokenIds, prefillOnly: { blocks, draws }, maxTokens: draws ? 6 : 0 });
  const [right, { cache }] = await Promise.all([ask(judge, promptTokenIds), answer.ended]);
  expect(answer.tokenIds).toEqual(right.tokenIds);
  expect(cache).toMatchObject({ handedTokens: blocks * blockTokens, cachedTokens: blocks * blockTokens });
  expect((await leg.ended).finishReason).toBe('prefilled');
  expect(leg.tokenIds).toEqual(draws ? right.tokenIds.slice(0, 1) : []);
  const ready = leg.states.map(({ readyBlocks }) => readyBlocks);
  expect(ready.at(-1)).toBe(blocks);
  expect(ready.length, 'told chunk by chunk').toBeGreaterThan(4);
  expect(await outcomes(decodeWorker(), 'complete')).toBe(1);
  await until(() => empty(prefill), 'prefill to hold nothing');
  await until(() => empty(decodeWorker()), 'decode to hold nothing');
});

it('one prompt at two workers of one node: each is told of all blocks, whoever wrote them', async () => {
  for (let table = 20; table < 24; table++) {
    const promptTokenIds = promptOf(table);
    const blocks = blocksOf(promptTokenIds);
    const legs = [prefill, beside].map((worker) => begin(worker, 'e', { promptTokenIds, prefillOnly: { blocks } }));
    for (const leg of legs) expect((await leg.ended).finishReason).toBe('prefilled');
    expect(legs.map(({ states }) => states.at(-1)!.readyBlocks)).toEqual([blocks, blocks]);
  }
});

it('called off in the middle: the rest is computed here', async () => {
  const promptTokenIds = promptOf(3);
  const blocks = blocksOf(promptTokenIds);
  const answer = begin(decode, 'b', { promptTokenIds, handOff: { blocks, ...patience } });
  await reserved(answer);
  const leg = begin(prefill, 'b', { promptTokenIds, prefillOnly: { blocks: 4 } });
  await leg.ended;
  expect(await change(decode, 'b', 0)).toBe(true);
  const right = await ask(judge, promptTokenIds);
  await answer.ended;
  expect(answer.tokenIds).toEqual(right.tokenIds);
  expect(await change(decode, 'b', 0)).toBe(false);
  expect(await outcomes(decode, 'changed')).toBe(1);
});

it('the caller leaves in the middle: both sides hold nothing a second later', async () => {
  const promptTokenIds = promptOf(4, longRows);
  const blocks = blocksOf(promptTokenIds);
  const answer = begin(decode, 'c', { promptTokenIds, handOff: { blocks, ...patience } });
  await reserved(answer);
  const leg = begin(prefill, 'c', { promptTokenIds, prefillOnly: { blocks } });
  await reserved(leg);
  answer.cancel();
  leg.cancel();
  // One after another: each worker is asked, and asks its node.
  const way = [services.prefill, services.nodeP, services.decode, services.nodeD];
  const cpuWaits = (): CpuWaits => new CpuWaits(() => way.map(({ pid }) => [pid]));
  const [waits, leftMs] = [cpuWaits(), performance.now()];
  await until(async () => (await empty(decode)) && (await empty(prefill)), 'blocks to come back', 30_000);
  expect(performance.now() - leftMs).toBeLessThan(1_000 + waits.ms);
  const [nodeWaits, freeMs] = [cpuWaits(), performance.now()];
  await until(
    async () => !/kvtier_node_events\{event="await.blocks"\} [1-9]/.test(await metricsText(decode)),
    'the node to await nothing',
  );
  expect(performance.now() - freeMs).toBeLessThan(1_000 + nodeWaits.ms);
  expect(await outcomes(decode, 'gone')).toBe(1);
});

it('prefill stands still for longer than its blocks are waited for: what it does after that harms nobody', async () => {
  const promptTokenIds = promptOf(6, longRows);
  const blocks = blocksOf(promptTokenIds);
  const awaited = await outcomes(decode, 'awaited');
  const answer = begin(decode, 'f', { promptTokenIds, handOff: { blocks, stallMs: 300, deadlineMs: 40_000 } });
  await reserved(answer);
  const leg = begin(prefill, 'f', { promptTokenIds, prefillOnly: { blocks } });
  await reserved(leg);
  await services.prefill.signal('SIGSTOP');
  const [right, { cache }] = await Promise.all([ask(judge, promptTokenIds), answer.ended]);
  expect(answer.tokenIds).toEqual(right.tokenIds);
  expect(cache!.handedTokens).toBeLessThan(blocks * blockTokens);
  expect((await outcomes(decode, 'awaited')) - awaited).toBe(1);
  await until(() => empty(decode), 'decode to hold nothing');
  await services.prefill.signal('SIGCONT');
  expect((await leg.ended).finishReason).toBe('prefilled'); // for nobody: whoever asked has not called it off
  await until(() => empty(prefill), 'prefill to hold nothing');
  expect((await ask(decode, promptTokenIds)).tokenIds).toEqual(right.tokenIds);
});

it('decode stands still until its wait is over: it computes what the node no longer holds for it', async () => {
  const promptTokenIds = promptOf(7);
  const blocks = blocksOf(promptTokenIds);
  // It stands still for less than keepalive takes (1.4 s): a ping that was under way would end the connection.
  const deadlineMs = 700;
  const answer = begin(decode, 'g', { promptTokenIds, handOff: { blocks, stallMs: deadlineMs, deadlineMs } });
  await reserved(answer);
  const leg = begin(prefill, 'g', { promptTokenIds, prefillOnly: { blocks } });
  await reserved(leg);
  const begun = performance.now();
  await services.decode.signal('SIGSTOP');
  expect((await leg.ended).finishReason).toBe('prefilled');
  await until(async () => performance.now() - begun > deadlineMs + 300, 'the deadline to pass');
  await services.decode.signal('SIGCONT');
  const [right] = await Promise.all([ask(judge, promptTokenIds), answer.ended]);
  expect(answer.tokenIds).toEqual(right.tokenIds);
  await until(async () => (await empty(decode)) && (await empty(prefill)), 'both to hold nothing');
  await until(
    async () =>
      !/kvtier_node_events\{event="(await.blocks|arena.pinned_blocks)"\} [1-9]/.test(await metricsText(decode)),
    'the node to hold nothing for it',
  );
});

it('prefill is killed in the middle: the same answer', async () => {
  const promptTokenIds = promptOf(5, longRows);
  const blocks = blocksOf(promptTokenIds);
  const awaited = await outcomes(decode, 'awaited');
  const answer = begin(decode, 'd', { promptTokenIds, handOff: { blocks, stallMs: 500, deadlineMs: 40_000 } });
  await reserved(answer);
  const leg = begin(prefill, 'd', { promptTokenIds, prefillOnly: { blocks } });
  await reserved(leg);
  await services.prefill.signal('SIGKILL');
  const [right, { cache }] = await Promise.all([ask(judge, promptTokenIds), answer.ended]);
  expect(answer.tokenIds).toEqual(right.tokenIds);
  expect(cache!.handedTokens).toBeLessThan(blocks * blockTokens);
  expect((await outcomes(decode, 'awaited')) - awaited).toBe(1);
  await until(() => empty(decode), 'decode to hold nothing');
});

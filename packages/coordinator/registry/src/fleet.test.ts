/** A fleet over real gRPC servers: who joins, who is refused and why, what is counted, who is found again. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createLogger } from '@kvtier/telemetry';
import { Registry } from '@kvtier/telemetry/metrics';
import type { Description, EngineLoad } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { fleetMetrics } from './fleet-metrics.ts';
import { SpokenDiscovery } from './testing/rig.ts';
import { event, greedy, ScriptedEngine, say } from './testing/scripted-engine.ts';
import type { Worker } from './worker.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000, interval: 5 };
const never = new AbortController().signal;

let dir: string;
let fleet: Fleet;
let discovery: SpokenDiscovery;
let engines: ScriptedEngine[];
let lines: string[];
beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-fleet-'));
  engines = [];
  lines = [];
  const logger = createLogger('fleet-test', 'silent');
  vi.spyOn(logger, 'warn').mockImplementation((_fields: unknown, line?: string) => void lines.push(line ?? ''));
  fleet = new Fleet({ logger, times: { refusedPauseMs: 50 } });
  discovery = new SpokenDiscovery();
  await fleet.start(discovery);
});
afterEach(async () => {
  await fleet.close();
  await Promise.all(engines.map((engine) => engine.stop()));
  rmSync(dir, { recursive: true, force: true });
});

const addressOf = (name: string): string => `unix:${dir}/${name}.sock`;
const recordOf = (name: string) => ({ name, address: addressOf(name) });

async function serve(name: string, description: Partial<Description> = {}): Promise<ScriptedEngine> {
  const engine = new ScriptedEngine(addressOf(name), '/models/m');
  engine.description = { ...engine.description, ...description };
  await engine.start();
  engines.push(engine);
  return engine;
}

const worker = (name: string): Worker => {
  const found = fleet.workers().find((one) => one?.record.name === name);
  if (!found) throw new Error(`no worker ${name}`);
  return found;
};
const stateOf = (name: string): string => fleet.workers().find((one) => one?.record.name === name)?.state ?? 'gone';
const until = (name: string, state: string): Promise<void> =>
  vi.waitFor(() => expect(stateOf(name)).toBe(state), patience);

async function tokensOf(number: number, requestId = 'r'): Promise<number[]> {
  const tokens: number[] = [];
  const request = greedy({ requestId, promptTokenIds: [5] });
  for await (const { tokenIds } of fleet.generate(number, request, never)) tokens.push(...tokenIds);
  return tokens;
}

it('a worker joins, says what it is, and answers', async () => {
  const engine = await serve('a', {
    maxSequences: 8,
    maxStepTokens: 512,
    namespaces: ['00112233aabbccdd', 'ffffffffffffffff'],
  });
  engine.script = say([1, 2, 3]);
  const states: string[] = [];
  const stop = fleet.onChange(() => states.push(stateOf('a')));
  discovery.say(recordOf('a'));
  expect(stateOf('a')).toBe('joining');
  await until('a', 'ready');
  stop();
  expect(states.at(0)).toBe('joining');
  expect(states.at(-1)).toBe('ready');
  const { number, facts } = worker('a');
  expect(number).toBe(0);
  expect(facts).toEqual({
    model: 'demo',
    modelDir: '/models/m',
    modelDigest: 'ab'.repeat(32),
    maxModelTokens: 4_096,
    vocabSize: 3_520,
    stopTokenIds: [2],
    blockTokens: 16,
    hashAlgorithm: 'sha256_cbor',
    hashSeed: 'seed',
    totalBlocks: 100,
    blockBytes: 16_384,
    maxStepTokens: 512,
    bootEpoch: engine.description.bootEpoch,
    maxRunning: 8,
    namespaces: ['00112233aabbccdd', 'ffffffffffffffff'],
  });
  expect(await tokensOf(0)).toEqual([1, 2, 3]);
  expect(await fleet.engine(0).metrics()).toBe(engine.prometheus);
  discovery.say();
  expect(stateOf('a')).toBe('gone');
  await expect(tokensOf0()).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
});
const tokensOf0 = async () => tokensOf(0);

it('one that dies is silent at once, and ready again when it is back', async () => {
  const engine = await serve('a');
  engine.script = (call) => void call.write(event({ tokenIds: [7] }));
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  const running = tokensOf(0);
  await vi.waitFor(() => expect(engine.seen).toHaveLength(1), patience);
  const failed = expect(running).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  await engine.stop();
  await failed;
  await until('a', 'silent');
  expect(worker('a').why).toMatch(/^worker a: engine at unix:.*a\.sock/);
  const again = await serve('a');
  await until('a', 'ready');
  expect(worker('a').number).toBe(0);
  expect(worker('a').facts!.bootEpoch).toBe(again.description.bootEpoch);
  expect(fleet.counts).toEqual({ ready: 2, lost: 1, refused: 0, restarted: 1 });
});

it('one that says nothing is silent within a second, and what it had ends', async () => {
  const engine = await serve('a');
  engine.script = (call) => void call.write(event({ tokenIds: [7] }));
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  const running = tokensOf(0);
  await vi.waitFor(() => expect(engine.seen).toHaveLength(1), patience);
  engine.alive = false;
  const from = performance.now();
  await expect(running).rejects.toMatchObject({
    code: 'DISCONNECTED',
    message: 'worker a: says nothing for 850 ms; see its process',
    retry: true,
  });
  // From its last word on, which came up to 250 ms before; where the machine stood still, a little more counts.
  expect(performance.now() - from).toBeGreaterThan(300);
  await engine.seen[0]!.cancelled;
  engine.alive = true;
  await until('a', 'ready');
});

it('draining: by its own word, by discovery, and when discovery drops it while it has something', async () => {
  const engine = await serve('a');
  engine.script = () => {};
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  discovery.say({ ...recordOf('a'), draining: true });
  expect(stateOf('a')).toBe('draining');
  discovery.say(recordOf('a'));
  expect(stateOf('a')).toBe('ready');
  const sent = fleet.sent(0, { requestId: 'r', tokensAhead: 1, blocks: 1, loadS: 0 });
  const running = tokensOf(0);
  await vi.waitFor(() => expect(engine.seen).toHaveLength(1), patience);
  discovery.say();
  expect(stateOf('a')).toBe('draining');
  discovery.say(recordOf('a'));
  expect(stateOf('a')).toBe('ready');
  discovery.say();
  engine.script = say([]);
  await fleet.engine(0).drain();
  engine.calls[0]!.write(event({ tokenIds: [9], finishReason: 'stop' }));
  engine.calls[0]!.end();
  expect(await running).toEqual([9]);
  expect(stateOf('a')).toBe('draining');
  sent.ended();
  expect(stateOf('a')).toBe('gone');
});

it('the worker’s own word that it drains counts, and its restart ends that', async () => {
  const engine = await serve('a');
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  expect(await fleet.engine(0).drain()).toBe(0);
  await until('a', 'draining');
  await engine.stop();
  await serve('a');
  await until('a', 'ready');
});

it.each<[string, Partial<Description>, string]>([
  [
    'other weights',
    { modelDigest: 'cd'.repeat(32) },
    'has weights of digest cdcdcdcdcdcdcdcd, worker a of the same model demo has abababababababab',
  ],
  ['other blocks', { blockTokens: 32 }, 'has blocks of 32 tokens, worker a of the same model demo has 16 tokens'],
  [
    'another hash',
    { hashAlgorithm: 'xxhash_cbor' },
    'hashes blocks by xxhash_cbor, worker a of the same model demo has sha256_cbor',
  ],
  [
    'another seed',
    { hashSeed: 'other' },
    'hashes blocks from the seed "other", worker a of the same model demo has "seed"',
  ],
])('one with %s is refused with one line, until the other goes', async (_, description, why) => {
  const a = await serve('a');
  a.script = say([1]);
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  const b = await serve('b', description);
  await serve('c', { ...description, model: 'another' });
  discovery.say(recordOf('a'), recordOf('b'), recordOf('c'));
  await until('b', 'refused');
  await until('c', 'ready');
  expect(worker('b').why).toBe(`worker b: ${why}; configure both alike`);
  expect(await tokensOf(0)).toEqual([1]);
  // It is asked again and again, and told once.
  const asked = b.described;
  await vi.waitUntil(() => b.described >= asked + 2, { timeout: 10_000 });
  expect(lines).toEqual([`worker b: ${why}; configure both alike`]);
  discovery.say(recordOf('b'));
  await until('b', 'ready');
});

it('of two workers of one name the first has it; the same process under two names counts once', async () => {
  const a = await serve('a');
  await serve('b');
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  discovery.say(recordOf('a'), { name: 'a', address: addressOf('b') }, { name: 'twin', address: addressOf('a') });
  await until('twin', 'refused');
  const [first, second, twin] = fleet.workers();
  expect([first!.state, second!.state]).toEqual(['ready', 'refused']);
  expect(second!.why).toBe(
    `worker a at ${addressOf('b')}: is the name of the worker at ${addressOf('a')} already; give each worker a name of its own`,
  );
  expect(twin!.why).toBe('worker twin: is the same process as worker a; list it once');
  expect(a.seen).toEqual([]);
  discovery.say({ name: 'a', address: addressOf('b') });
  await until('a', 'ready');
  expect(worker('a').number).toBe(1);
});

it.each<[string, Partial<Description>]>([
  ['no tokens in a block', { blockTokens: 0 }],
  ['more blocks than there are bytes', { blockCount: 2n ** 50n }],
  ['no name', { model: '' }],
  ['no vocabulary', { vocabSize: 0 }],
  ['a namespace of seven digits', { namespaces: ['0011223'] }],
])('one that says that it has %s is refused', async (_, description) => {
  const b = await serve('b', description);
  discovery.say(recordOf('b'));
  await until('b', 'refused');
  expect(worker('b').why).toMatch(
    /^worker b: what it is is told with nonsense \(\w+: .*\); run workers and coordinator of one version$/,
  );
  b.description = new ScriptedEngine('', '').description;
  await until('b', 'ready');
});

it.each<[string, Partial<EngineLoad>]>([
  ['NaN', { loadAheadS: Number.NaN }],
  ['less than nothing', { loadAheadS: -1 }],
  ['more than can be', { tokensAhead: 2n ** 60n }],
  [
    'a rate without an end',
    {
      rates: {
        prefillTokensPerS: Number.POSITIVE_INFINITY,
        stepS: 0,
        stepPerRequestS: 0,
        freedBlocksPerS: 0,
        loadBlocksPerS: {},
      },
    },
  ],
  [
    'a thousand tiers',
    {
      rates: {
        prefillTokensPerS: 1,
        stepS: 0,
        stepPerRequestS: 0,
        freedBlocksPerS: 0,
        loadBlocksPerS: Object.fromEntries(Array.from({ length: 1_000 }, (_, i) => [`t${i}`, 1])),
      },
    },
  ],
])('one whose load says %s is refused, and nothing of it counts', async (_, load) => {
  const engine = await serve('a');
  engine.load = { waiting: 1 };
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  engine.load = { waiting: 5, ...load };
  engine.tell();
  await until('a', 'refused');
  expect(worker('a').why).toMatch(/^worker a: its load is told with nonsense/);
  expect(worker('a').load.waiting).toBe(1);
  engine.load = {};
  await until('a', 'ready');
});

it('one that has not measured yet is taken for one like the others', async () => {
  const rates = {
    prefillTokensPerS: 5_000,
    stepS: 0.01,
    stepPerRequestS: 0.001,
    freedBlocksPerS: 3,
    pacingTrust: 0.7,
    loadBlocksPerS: { arena: 9, s3: 2, tape: 1 },
  };
  const a = await serve('a');
  await serve('b');
  discovery.say(recordOf('a'), recordOf('b'));
  await until('a', 'ready');
  await until('b', 'ready');
  expect(worker('b').load).toMatchObject({ prefillTokensPerS: 2_000, loadBlocksPerS: [] });
  a.load = { rates };
  a.tell();
  const { loadBlocksPerS: _, ...others } = rates;
  await vi.waitFor(
    () => expect(worker('a').load).toMatchObject({ ...others, loadBlocksPerS: [0, 9, 0, 0, 0, 2] }),
    patience,
  );
  await vi.waitFor(() => expect(worker('b').load.prefillTokensPerS).toBe(5_000), patience);
});

it('one with a cache node that has loaded nothing yet is thought to load as the others do', async () => {
  const rates = { prefillTokensPerS: 1_600, stepS: 0, stepPerRequestS: 0, freedBlocksPerS: 0, loadBlocksPerS: {} };
  const a = await serve('a', { blockTokens: 16 });
  const b = await serve('b', { blockTokens: 16 });
  discovery.say({ ...recordOf('a'), node: 'n1' }, { ...recordOf('b'), node: 'n2' });
  a.load = { rates };
  b.load = { rates };
  const loads = (name: string) => worker(name).load.loadBlocksPerS;
  await until('a', 'ready');
  await until('b', 'ready');
  // Four times as fast as it computes, while nobody knows.
  await vi.waitFor(() => expect(loads('a')).toEqual([0, 400, 400, 400, 400, 400]), patience);
  a.load = { rates: { ...rates, loadBlocksPerS: { peer: 70 } } };
  a.tell();
  await vi.waitFor(() => expect(loads('a')).toEqual([0, 400, 400, 70, 400, 400]), patience);
  b.tell();
  await vi.waitFor(() => expect(loads('b')).toEqual([0, 400, 400, 70, 400, 400]), patience);
});

it('one that loaded another tokenizer beside the same weights is refused; one that does not say, is not', async () => {
  const textDigest = '0123456789abcdef'.repeat(4);
  await serve('a', { textDigest });
  discovery.say(recordOf('a'));
  await until('a', 'ready');
  await serve('b', { textDigest: 'f'.repeat(64) });
  await serve('c');
  discovery.say(recordOf('a'), recordOf('b'), recordOf('c'));
  await until('b', 'refused');
  await until('c', 'ready');
  expect(worker('b').why).toBe(
    'worker b: has tokenizer and chat template of digest ffffffffffffffff, worker a of the same model demo has 0123456789abcdef; configure both alike',
  );
});

it('addresses that are none, or that are beyond loopback without TLS, are refused', async () => {
  discovery.say(
    { name: 'x', address: 'http://10.1.2.3:80' },
    { name: 'y', address: '10.1.2.3:50051' },
    { name: 'z', kind: 'openai', address: 'http://10.1.2.3:8000' },
    { name: 'v', kind: 'openai', address: 'https://10.1.2.3:8000' },
    { name: 'w', kind: 'openai', address: '10.1.2.3:8000' },
  );
  expect(fleet.workers().map((one) => one!.state)).toEqual(Array(5).fill('refused'));
  const beyond =
    'is beyond loopback, where TLS and a token or a certificate of ours are needed; use https and configure tokenFile or certFile, or say "access": {"trustedNetwork": true}';
  expect(fleet.workers().map((one) => one!.why)).toEqual([
    'worker x: http://10.1.2.3:80 is no address; give unix:/PATH or HOST:PORT',
    'worker y: 10.1.2.3:50051 is beyond loopback, where TLS and a certificate of ours are needed; configure caFile, certFile and keyFile',
    `worker z: http://10.1.2.3:8000 ${beyond}`,
    `worker v: https://10.1.2.3:8000 ${beyond}`,
    'worker w: 10.1.2.3:8000 is no address; give http://HOST:PORT or https://HOST:PORT',
  ]);
});

it('one that is refused for its address is told of and counted once, whoever else comes and goes', async () => {
  const bad = { name: 'y', address: '10.1.2.3:50051' };
  const changes: string[] = [];
  discovery.say(bad);
  const told = lines.length;
  fleet.onChange(() => changes.push(stateOf('y')));
  await serve('a');
  for (let i = 0; i < 3; i++) {
    discovery.say(bad, recordOf('a'));
    discovery.say({ ...bad, draining: true });
  }
  discovery.say(bad, recordOf('a'));
  await until('a', 'ready');
  expect([told, lines.filter((line) => line.startsWith('worker y')).length, fleet.counts.refused]).toEqual([1, 1, 1]);
  expect(new Set(changes)).toEqual(new Set(['refused']));
  // A worker of its name that can be reached has the name as soon as it is gone.
  const y = { name: 'y', address: addressOf('a') };
  discovery.say(bad, y);
  expect(fleet.workers().flatMap((one) => one?.state ?? [])).toEqual(['refused', 'refused']);
  discovery.say(y);
  await until('y', 'ready');
});

it('a name may move to another address while who had it ends what it has', async () => {
  const old = await serve('old');
  old.script = () => {};
  const fresh = await serve('fresh');
  fresh.script = say([1]);
  discovery.say({ name: 'a', address: addressOf('old') });
  await until('a', 'ready');
  const running = expect(tokensOf(0)).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  await vi.waitFor(() => expect(old.seen).toHaveLength(1), patience);
  discovery.say({ name: 'a', address: addressOf('fresh') });
  await vi.waitFor(() => expect(fleet.workers().map((one) => one?.state)).toEqual(['draining', 'ready']), patience);
  expect(await tokensOf(1)).toEqual([1]);
  await old.stop();
  await running;
  await vi.waitFor(() => expect(fleet.workers().map((one) => one?.state)).toEqual([undefined, 'ready']), patience);
});

it('its metrics say who is there, and each word of a load is told to who listens', async () => {
  const engine = await serve('a');
  engine.load = { waiting: 2, running: 1, tokensAhead: 30n, usedBlocks: 4n };
  let told = 0;
  const stop = fleet.onLoad(() => told++);
  discovery.say(recordOf('a'), { name: 'b', address: '10.0.0.1:1' });
  await until('a', 'ready');
  await vi.waitFor(() => expect(told).toBeGreaterThan(2), patience);
  stop();
  discovery.problem('redis: cannot be reached');
  const registry = new Registry();
  fleetMetrics(fleet, registry);
  const text = await registry.metrics();
  for (const line of [
    'kvtier_worker_state{worker="a",state="ready"} 1',
    'kvtier_worker_state{worker="b",state="refused"} 1',
    'kvtier_workers{state="ready"} 1',
    'kvtier_workers{state="silent"} 0',
    'kvtier_worker_waiting{worker="a"} 2',
    'kvtier_worker_running{worker="a"} 1',
    'kvtier_worker_tokens_ahead{worker="a"} 30',
    'kvtier_worker_prefill_tokens_per_second{worker="a",rate="assumed"} 2000',
    'kvtier_worker_used_blocks{worker="a"} 4',
    'kvtier_worker_events_total{event="ready"} 1',
    'kvtier_worker_events_total{event="refused"} 1',
    'kvtier_discovery_stale 1',
  ])
    expect(text).toContain(`${line}\n`);
  expect(text).toMatch(/kvtier_worker_told_age_seconds\{worker="a"\} 0\.\d+\n/);
  expect(text).not.toMatch(/told_age_seconds\{worker="b"/);
});

it('workers beyond the bound are left out with a line, and discovery’s problems are told once', async () => {
  const small = new Fleet({
    logger: Object.assign(createLogger('fleet-test', 'silent'), {
      warn: (_: unknown, line: string) => lines.push(line),
    }),
    maxWorkers: 2,
  });
  const other = new SpokenDiscovery();
  await small.start(other);
  other.say(recordOf('a'), recordOf('b'), recordOf('c'));
  expect(small.workers()).toHaveLength(2);
  other.problem('redis: cannot be reached');
  other.problem('redis: cannot be reached');
  expect(small.discoveryProblem).toBe('redis: cannot be reached');
  other.problem(undefined);
  expect(small.discoveryProblem).toBeUndefined();
  await small.close();
  expect(lines.slice(0, 2)).toEqual([
    'fleet: 1 workers beyond 2 are left out; a coordinator knows 2 at most: give the others a coordinator of their own',
    'redis: cannot be reached',
  ]);
});

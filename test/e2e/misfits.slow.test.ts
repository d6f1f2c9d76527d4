/**
 * Members that cannot be of this cluster, and events that lie, between real processes: each is refused or ignored with one clear line,
 * again and again is told once, and nothing else is disturbed: who asks meanwhile gets right answers at the first try.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { nodeRecordSchema } from '@kvtier/config';
import { type BlockStored, type KvEvent, KvEventPublisher } from '@kvtier/events';
import { announceNode } from '@kvtier/membership';
import { Lines, memberServers } from '@kvtier/membership/testing';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { RedisServer } from '../../infra/redis/servers.ts';
import { modelDir, Service } from '../faults/engine-rig.ts';
import { SteadyLoad } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';

const otherModelDir = fileURLToPath(new URL('../numerics/golden/llama', import.meta.url));
const requests = sharedPrompts(8, 4);
const patience = { timeout: 40_000, interval: 20 };
const folder = mkdtempSync(join(tmpdir(), 'kvm-'));
const ends: (() => unknown)[] = [];
let right: readonly (readonly number[])[] = [];
let server: RedisServer;
let rig: ClusterRig;

beforeAll(async () => {
  const alone = await ClusterRig.start({ workers: 1, nodes: 0, coordinators: 1 });
  try {
    right = await Promise.all(requests.map(async (request) => (await alone.ask(request)).tokenIds));
  } finally {
    await alone.close();
  }
  server = await RedisServer.start();
  rig = await ClusterRig.start({ workers: 2, nodes: 0, coordinators: 1, redis: { servers: [server.url] } });
}, 200_000);
afterAll(async () => {
  for (const end of ends.splice(0).reverse()) await end();
  await rig?.close();
  await server?.stop();
  rmSync(folder, { recursive: true, force: true });
});

/** An engine that announces itself under this name. */
async function enroll(name: string, file: string, config: object, membership: object = {}): Promise<Service> {
  const service = new Service('engine-worker', {
    ...{ modelDir, servedName: 'demo', listen: `unix:${join(folder, file)}`, cacheNodeSocket: null, kvBytes: 8 << 20 },
    ...{ threads: 1, membership: { redis: { servers: [server.url] }, name, ...membership }, logLevel: 'warn' },
    ...config,
  });
  ends.push(() => service.signal('SIGKILL'));
  await service.start();
  return service;
}

interface Card {
  readonly name: string;
  readonly state: string;
  readonly why?: string;
}
async function cards(): Promise<Map<string, Card>> {
  const { workers } = (await (await fetch(`${rig.url(0)}/health`)).json()) as { workers: Card[] };
  return new Map(workers.map((card) => [card.name, card]));
}
/** Lines of a process that say this. */
const lines = ({ said }: Service, text: string): number =>
  said.split('\n').filter((line) => line.includes(text)).length;

it('are refused or ignored, each with one line, while the others serve on', { timeout: 200_000 }, async () => {
  const [coordinator] = rig.coordinators;
  const load = new SteadyLoad(2, async (at) => {
    const which = at % requests.length;
    const answer = await rig.ask(requests[which]!);
    expect(answer.tokenIds).toEqual(right[which]);
    expect(answer.failures).toEqual([]);
    return answer;
  });
  try {
    const twin = await enroll('worker-0', 'twin', {});
    await enroll('blocks', 'blocks', { blockTokens: 32 });
    await enroll('seed', 'seed', { hashSeed: 'another' });
    await enroll('hash', 'hash', { hashAlgorithm: 'xxhash_cbor' });
    await enroll('model', 'model', { modelDir: otherModelDir, kvBytes: 1 << 20 });
    const refusals: Record<string, RegExp> = {
      blocks: /^worker blocks: has blocks of 32 tokens, worker worker-\d of the same model demo has 16 tokens;/,
      seed: /^worker seed: hashes blocks from the seed "another", worker worker-\d of the same model demo has "vllm-none-hash";/,
      hash: /^worker hash: hashes blocks by xxhash_cbor, worker worker-\d of the same model demo has sha256_cbor;/,
      model:
        /^worker model: has weights of digest [0-9a-f]{16}, worker worker-\d of the same model demo has [0-9a-f]{16};/,
    };
    await vi.waitFor(async () => {
      const known = await cards();
      for (const [name, why] of Object.entries(refusals)) {
        expect(known.get(name)).toMatchObject({ state: 'refused' });
        expect(known.get(name)!.why).toMatch(why);
        expect(known.get(name)!.why).toMatch(/; configure both alike$/);
      }
      expect(lines(twin, 'another living member has this name; give each member a name of its own')).toBe(1);
    }, patience);

    const publisher = await liar();
    const from = load.answers.length;
    await vi.waitFor(async () => {
      publisher.say();
      for (const [kind, said] of lies) expect(lines(coordinator!, said), kind).toBe(1);
      // A hole in its sequence is a gap; and that it holds what follows nothing, or held what it never had, is no lie that can be told.
      const said = await rig.metrics();
      expect(said.get('kvtier_kv_index_breaks_total{kind="gaps"}')).toBeGreaterThan(0);
      expect(ignoredKinds(said)).toEqual(['block_size', 'medium']);
      expect(load.answers.length).toBeGreaterThan(from + 2 * requests.length);
    }, patience);

    // All of it is told once, however often they were asked again and the lies repeated.
    for (const name of Object.keys(refusals)) expect(lines(coordinator!, `worker ${name}: h`), name).toBe(1);
    const states = [...(await cards()).values()].map(({ name, state }) => `${name} ${state}`).sort();
    expect(states).toEqual([
      ...['blocks refused', 'hash refused', 'model refused', 'seed refused'],
      ...['worker-0 ready', 'worker-1 ready', 'worker-2 ready'],
    ]);
    expect(twin.said.split('\n').filter((line) => line !== '')).toHaveLength(1);
  } finally {
    await load.stop();
  }
  const metrics = await rig.metrics();
  const given = [0, 1, 2].map((i) => metrics.get(`kvtier_worker_state{worker="worker-${i}",state="ready"}`));
  expect(given).toEqual([1, 1, 1]);
});

/** Of events that cannot be. */
const ignoredKinds = (metrics: ReadonlyMap<string, number>): string[] =>
  [...metrics]
    .flatMap(([name, count]) => {
      const kind = /^kvtier_kv_index_ignored_events_total\{kind="(\w+)"\}$/.exec(name)?.[1];
      return kind === undefined || count === 0 ? [] : [kind];
    })
    .toSorted();

/** Of a lie, what the coordinator says to it. */
const lies: readonly (readonly [string, string])[] = [
  ['block size', 'KV events of cache node liar: blocks of 7 tokens, the index has blocks of 16; ignored'],
  ['medium', 'KV events of cache node liar: blocks on MOON, which no cache node has; ignored'],
];

/** A node whose events say what cannot be, and a worker beside it, for nobody listens to a node without one. */
async function liar(): Promise<{ say(): void }> {
  const at = { endpoint: `ipc://${join(folder, 'e')}`, replayEndpoint: `ipc://${join(folder, 'r')}` };
  const publisher = await KvEventPublisher.start({ ...at, topic: '' });
  ends.push(() => publisher.close());
  const options = { redis: memberServers([server.url]), leaseMs: 1_500, log: new Lines() };
  const node = announceNode(nodeRecordSchema.parse({ name: 'liar', events: { ...at, topic: '' } }), options);
  ends.push(() => node.close());
  await enroll('worker-2', 'beside', {}, { node: 'liar' });
  const block = (part: Partial<BlockStored>): KvEvent => ({
    ...{ type: 'BlockStored', blockHashes: [1n, 2n], parentBlockHash: 77n, tokenIds: [], blockSize: 0 },
    ...{ loraId: null, loraName: null, medium: 'CPU' },
    ...part,
  });
  return {
    say: () => {
      publisher.skip();
      publisher.publish([
        block({}),
        block({ medium: 'MOON' }),
        block({ blockSize: 7 }),
        { type: 'BlockRemoved', blockHashes: [99n], medium: 'CPU' },
      ]);
    },
  };
}

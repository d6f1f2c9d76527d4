/** What workers say of themselves, as their model's index uses it. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type NodeRecord, nodeRecordSchema } from '@kvtier/config';
import { factsOf, recordOf } from '@kvtier/dispatch/testing';
import { type KvEvent, KvEventPublisher } from '@kvtier/events';
import { ChainHasher, hashKeyOf } from '@kvtier/identity';
import { IndexFeed, keysOfHashes } from '@kvtier/kv-index';
import type { Worker, WorkerFacts } from '@kvtier/registry';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Indexes, type IndexesOptions } from './indexes.ts';

const [mine, others] = ['0011223344556677', 'ffeeddccbbaa9988'];
const packed = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 16 }).hashBlocks(null, new Uint32Array(6 * 16));
const blockHashes = Array.from({ length: 6 }, (_, i) => hashKeyOf(packed.subarray(32 * i, 32 * i + 32)));

let folder: string;
let node: KvEventPublisher;
let indexes: Indexes | undefined;
const endpoints = () => ({ endpoint: `ipc://${folder}/n`, replayEndpoint: `ipc://${folder}/n-replay` });
beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-indexes-'));
  node = await KvEventPublisher.start(endpoints());
});
afterEach(async () => {
  indexes?.close();
  await node.close();
  rmSync(folder, { recursive: true });
});

/** Of two workers, the first beside the node, that say this of themselves: blocks of the prompt that each has at hand. */
function follow(part: Partial<WorkerFacts>): () => number[] {
  const workers = ['a', 'b'].map((name, number): Worker => {
    const record = recordOf(name, { node: number === 0 ? 'n' : null });
    const facts = factsOf({ modelDir: '/m', ...part });
    return { number, record, state: 'ready', why: undefined, facts } as unknown as Worker;
  });
  const nodes = [nodeRecordSchema.parse({ name: 'n', events: endpoints() })];
  const fleet = { workers: () => workers, nodes: () => nodes, onChange: () => () => {} };
  const logger = createLogger('indexes-test', 'silent');
  indexes = new Indexes({ fleet, maxBytes: 1 << 24, tokenizers: {}, logger });
  const keys = keysOfHashes(packed, 32);
  return () => indexes!.match('demo', keys, [0, 1]).map(({ blocks }) => blocks);
}

it('a node that keeps blocks of several models counts for those of its worker, by the namespaces that this one names', async () => {
  const held = follow({ namespaces: [mine] });
  const tier = { parentBlockHash: null, tokenIds: [], blockSize: 0, loraId: null, loraName: null, medium: 'CPU' };
  node.publish([{ type: 'BlockStored', blockHashes, ...tier }], `@${others}`);
  node.publish([{ type: 'BlockStored', blockHashes: blockHashes.slice(0, 4), ...tier }], `@${mine}`);
  await vi.waitFor(() => expect(held()).toEqual([4, 0]), { timeout: 15_000, interval: 10 });
  node.publish([{ type: 'BlockRemoved', blockHashes: blockHashes.slice(2), medium: 'CPU' }], `@${mine}`);
  await vi.waitFor(() => expect(held()).toEqual([2, 0]), { timeout: 15_000, interval: 10 });
});

describe('a node beside a pod, which names blocks by another root than prompts are named', () => {
  const theirs = new ChainHasher({ algorithm: 'sha256', blockTokens: 16, rootSeed: '0' });
  const tokens = Uint32Array.from({ length: 6 * 16 }, (_, i) => 7 * i);
  const its = theirs.hashBlocks(null, tokens);
  const hashes = Array.from({ length: 6 }, (_, i) => hashKeyOf(its.subarray(32 * i, 32 * i + 32)));
  const ours = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 16 }).hashBlocks(null, tokens);
  const keys = keysOfHashes(ours, 32);
  const tier = { blockSize: 16, loraId: null, loraName: null };
  const stored = (to: number, medium: string, tokenIds: readonly number[]): KvEvent => ({
    ...{ type: 'BlockStored', blockHashes: hashes.slice(0, to), parentBlockHash: null, tokenIds, medium, ...tier },
  });
  const described = (to: number) => stored(to, 'CPU', [...tokens.slice(0, 16 * to)]);
  const bare = (to: number, medium = 'DISK') => stored(to, medium, []);
  const wait = { timeout: 15_000, interval: 10 };
  const lines: string[] = [];

  /** Blocks that a pod beside the node has at hand, and one without a node. */
  function open(): () => readonly number[] {
    const workers = ['n', null].map((node, number): Worker => {
      const record = { ...recordOf(`pod-${number}`, { node }), kind: 'openai' as const, events: null };
      return { number, record, state: 'ready', why: undefined, facts: factsOf({ modelDir: '' }) } as unknown as Worker;
    });
    const nodes = [nodeRecordSchema.parse({ name: 'n', peer: { host: '127.0.0.1', port: 1 }, events: endpoints() })];
    const fleet = { workers: () => workers, nodes: () => nodes, onChange: () => () => {} };
    const logger = createLogger('indexes-test', 'silent');
    lines.length = 0;
    for (const level of ['info', 'warn'] as const)
      vi.spyOn(logger, level).mockImplementation((_: unknown, line?: string) => void lines.push(line ?? ''));
    indexes = new Indexes({ fleet, maxBytes: 1 << 24, tokenizers: { demo: '/m' }, logger });
    return () => indexes!.match('demo', keys, [0, 1]).map(({ blocks }) => blocks);
  }

  it('is credited with what it tells the tokens of, and with its disk after it has started again', async () => {
    const held = open();
    node.publish([described(6)], `@${mine}`);
    node.publish([bare(4)], `@${mine}`);
    await vi.waitFor(() => expect(held()).toEqual([6, 0]), wait);
    // The other pod has no node, and so nobody to fetch it.
    expect(indexes!.match('demo', keys, [1])[0]).toMatchObject({ blocks: 0, remoteBlocks: 0 });
    await node.close();
    node = await KvEventPublisher.start(endpoints());
    node.tellSnapshots(() => [{ events: [bare(4)], subtopic: `@${mine}` }]);
    node.publish([bare(4)], `@${mine}`);
    await vi.waitFor(() => expect(held()).toEqual([4, 0]), wait);
    const { nodes, totals } = indexes!.state().demo!;
    expect([nodes.map(({ why }) => why), totals.unnamedBlocks]).toEqual([[undefined], 0]);
  });

  it('that tells no tokens is credited with nothing, and that is counted and said', async () => {
    const held = open();
    node.publish([bare(6, 'CPU')], `@${mine}`);
    const what = 'none of its blocks can be named, as it tells no tokens of them';
    await vi.waitFor(() => expect(indexes!.state().demo!.nodes[0]!.why).toMatch(what), wait);
    expect([held(), indexes!.state().demo!.totals.unnamedBlocks]).toEqual([[0, 0], 6]);
    expect(lines.filter((line) => line.includes(what))).toHaveLength(1);
    node.publish([described(3)], `@${mine}`);
    await vi.waitFor(() => expect(held()).toEqual([3, 0]), wait);
    expect(indexes!.state().demo!.nodes[0]!.why).toBeUndefined();
  });
});

describe('which models have an index', () => {
  const worker = (number: number, model: string, kind: 'kvtier' | 'openai' = 'openai', blockTokens = 16): Worker => {
    const record = { ...recordOf(`w${number}`), kind };
    const facts = {
      ...factsOf({ modelDir: kind === 'kvtier' ? '/m' : '', blockTokens, totalBlocks: 200_000 }),
      model,
    };
    return { number, record, state: 'ready', why: undefined, facts } as unknown as Worker;
  };
  const keys = keysOfHashes(packed, 32);
  let workers: Worker[];
  let nodes: NodeRecord[];
  let changed: () => void;
  const lines: string[] = [];
  function open(first: Worker[], more: Partial<IndexesOptions> = {}): void {
    workers = first;
    nodes = [];
    lines.length = 0;
    const fleet = {
      workers: () => workers,
      nodes: () => nodes,
      onChange: (listener: () => void) => {
        changed = listener;
        return () => {};
      },
    };
    const logger = createLogger('indexes-test', 'silent');
    vi.spyOn(logger, 'warn').mockImplementation((_: unknown, line?: string) => void lines.push(line ?? ''));
    indexes = new Indexes({ fleet, maxBytes: 1 << 24, tokenizers: {}, logger, ...more });
  }
  const become = (next: Worker[]): void => {
    workers = next;
    changed();
  };
  const held = (model: string, number: number) => indexes!.match(model, keys, [number])[0]!;

  it('one of our workers has none, a pod has one, and so has all that somebody plans for', () => {
    open([worker(0, 'ours', 'kvtier'), worker(1, 'pod')]);
    expect(Object.keys(indexes!.state())).toEqual(['pod']);
    expect([held('ours', 0).isUnknown, held('pod', 1).isUnknown]).toEqual([true, undefined]);
    // Nobody is degraded where nobody is chosen by a guess.
    expect(indexes!.isGuessing).toBe(false);
    indexes!.close();
    open([worker(0, 'ours', 'kvtier')], { isPlanned: true });
    indexes!.sent('ours', 0, keys);
    expect(held('ours', 0)).toMatchObject({ blocks: 6 });
  });

  it('what comes and goes leaves the others what they hold, and all share the bytes', () => {
    open([worker(0, 'a')]);
    const shares = () => Object.values(indexes!.state()).map(({ maxBytes }) => maxBytes / (1 << 24));
    indexes!.sent('a', 0, keys);
    become([worker(0, 'a'), worker(1, 'a'), worker(2, 'b')]);
    indexes!.sent('b', 2, keys);
    expect([held('a', 0).blocks, held('a', 1).blocks, held('b', 2).blocks, shares()]).toEqual([6, 0, 6, [0.5, 0.5]]);
    become([worker(0, 'a'), worker(2, 'b')]);
    expect([held('a', 0).blocks, held('b', 2).blocks]).toEqual([6, 6]);
    become([worker(2, 'b')]);
    expect([held('a', 0).isUnknown, held('b', 2).blocks, shares()]).toEqual([true, 6, [1]]);
    // Blocks of another size are other blocks.
    become([worker(2, 'b', 'openai', 32)]);
    expect(held('b', 2).blocks).toBe(0);
    expect(lines.filter((line) => line.includes('anew'))).toEqual([]);
  });

  it('one whose blocks cannot be named, or that has too few bytes, has none, and disturbs no other', async () => {
    const strange = [worker(0, 'strange', 'kvtier'), worker(1, 'strange', 'kvtier')];
    for (const { facts } of strange) Object.assign(facts!, { hashAlgorithm: 'blake3' });
    open([worker(2, 'b')]);
    become([...strange, worker(2, 'b')]);
    await new Promise(setImmediate);
    indexes!.sent('b', 2, keys);
    expect([held('strange', 0).isUnknown, held('b', 2).blocks]).toEqual([true, 6]);
    become([...strange, worker(2, 'b'), worker(3, 'b')]);
    expect(Object.keys(indexes!.state())).toEqual(['b']);
    const line = 'KV index of strange: hash algorithm "blake3" is not known';
    expect(lines.filter((one) => one.includes('strange')).map((one) => one.slice(0, line.length))).toEqual([line]);
    indexes!.close();
    open([worker(0, 'a')], { maxBytes: 1 << 19 });
    become([worker(0, 'a'), worker(1, 'b'), worker(2, 'c')]);
    expect(Object.keys(indexes!.state())).toEqual([]);
    expect(lines.filter((one) => one.includes('routed without one'))).toHaveLength(3);
    become([worker(0, 'a')]);
    expect(Object.keys(indexes!.state())).toEqual(['a']);
  });

  it('many changes of one turn are followed once: when somebody asks, or soon', async () => {
    open([worker(0, 'a'), worker(1, 'a')]);
    const follow = vi.spyOn(IndexFeed.prototype, 'follow');
    try {
      for (let i = 0; i < 100; i++) become([worker(0, 'a'), worker(2, 'a')]);
      expect(follow).not.toHaveBeenCalled();
      // Who asks sees what is.
      indexes!.sent('a', 2, keys);
      expect([held('a', 2).blocks, follow.mock.calls.length]).toEqual([6, 1]);
      await new Promise(setImmediate);
      expect(follow).toHaveBeenCalledTimes(1);
      for (let i = 0; i < 100; i++) become([worker(0, 'a')]);
      await new Promise(setImmediate);
      expect(follow).toHaveBeenCalledTimes(2);
      become([worker(1, 'a')]);
      indexes!.close();
      await new Promise(setImmediate);
      expect([follow.mock.calls.length, indexes!.state()]).toEqual([2, {}]);
    } finally {
      follow.mockRestore();
    }
  });

  it('has room for names of blocks where a pod or the node beside it publishes, and keeps it when the last such node goes', () => {
    const pod = worker(0, 'a');
    const beside = { ...pod, record: { ...pod.record, node: 'n', events: null } };
    const nodeOf = (part: object) => [nodeRecordSchema.parse({ name: 'n', ...part })];
    // With room for names, there is none for so many blocks.
    const many = new Int32Array(2 * 70_000).map((_, i) => (i % 2 === 0 ? i + 1 : 7));
    const fits = (): boolean => {
      indexes!.sent('a', 0, many);
      return indexes!.state().a!.index.droppedBlocks === 0;
    };
    open([beside], { maxBytes: 4 << 20, tokenizers: { a: '/m' } });
    nodes = nodeOf({ peer: { host: '127.0.0.1', port: 1 }, events: null });
    changed();
    expect(fits()).toBe(true);
    nodes = nodeOf({ events: endpoints() });
    changed();
    expect([held('a', 0).blocks, fits()]).toEqual([0, false]);
    indexes!.sent('a', 0, keys);
    nodes = [];
    changed();
    expect(held('a', 0).blocks).toBe(6);
  });

  it('what an index has counted stays counted when it ends', async () => {
    const told = worker(0, 'a');
    open([{ ...told, record: { ...told.record, events: endpoints() } } as unknown as Worker], {
      tokenizers: { a: '/m' },
    });
    const tokens = { parentBlockHash: null, tokenIds: [], blockSize: 32, loraId: null, loraName: null };
    node.publish([{ type: 'BlockStored', blockHashes, ...tokens, medium: 'GPU' }]);
    const lies = () => indexes!.state().a?.totals.lies.block_size;
    await vi.waitFor(() => expect(lies()).toBe(1), { timeout: 15_000, interval: 10 });
    become([worker(1, 'b')]);
    expect([lies(), indexes!.past().lies.block_size, indexes!.state().b!.totals.lies.block_size]).toEqual([
      undefined,
      1,
      0,
    ]);
    become([]);
    expect(indexes!.past().lies.block_size).toBe(1);
  });

  it('one that has taken more than its new share begins anew, and says so', () => {
    open([worker(0, 'a')], { maxBytes: 4 << 20 });
    const many = Int32Array.from({ length: 2 * 70_000 }, (_, i) => Math.imul(i + 1, 2_654_435_761));
    indexes!.sent('a', 0, many);
    const { index, namesBytes, maxBytes } = indexes!.state().a!;
    expect(index.blocks).toBe(70_000);
    expect(index.bytes + namesBytes).toBeLessThanOrEqual(maxBytes);
    become([worker(0, 'a'), worker(1, 'b')]);
    expect(indexes!.match('a', many, [0])[0]!.blocks).toBe(0);
    expect(lines.filter((line) => line.includes('anew'))).toEqual([
      'KV index of a: has taken more than its share of 2097152 bytes; begins anew',
    ]);
    const all = Object.values(indexes!.state()).reduce((sum, one) => sum + one.index.bytes + one.namesBytes, 0);
    expect(all).toBeLessThanOrEqual(4 << 20);
  });

  it('a pod of several engines is followed as such', () => {
    const follow = vi.spyOn(IndexFeed.prototype, 'follow');
    const pod = worker(0, 'a');
    open([{ ...pod, facts: { ...pod.facts!, engines: 4 } }, worker(1, 'a')]);
    expect(Object.keys(indexes!.state())).toEqual(['a']);
    expect(follow.mock.calls.at(-1)![0].map(({ engines }) => engines)).toEqual([4, undefined]);
    follow.mockRestore();
  });

  it.each(['a', 'constructor'])(
    'of a pod of %s whose prompts are read as text, it says what has to be done',
    (model) => {
      const deaf = worker(1, model);
      open([worker(0, model), { ...deaf, record: { ...deaf.record, events: { ...endpoints(), topic: '' } } }]);
      const remedy = "name the model's folder in `tokenizers`";
      expect(indexes!.state()[model]!.workers.map(({ why }) => why)).toEqual([
        `publishes no KV events: let it, say where in its record (\`events\`), and ${remedy}`,
        `its KV events are not read: ${remedy}`,
      ]);
    },
  );
});

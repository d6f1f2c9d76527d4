/**
 * The store's lookup: one 128k-token chain (8,192 blocks of 16 tokens, packed as the session link brings it) with 1,000,000
 * blocks indexed over an arena and a lower tier. Beside it, in the same rounds: as many random reads of a cache line from a
 * table of the index's size (what memory itself takes), and as many look-ups in a bare JavaScript Map with a string per
 * hash. The chains were stored in turns, in pieces, as engines side by side do. Recency is part of the lookup's promise and is told to the tiers in later turns, whose longest is a figure, too. The
 * tiers here list names and keep a real LRU order; no byte of KV is needed to look something up.
 */
import { randomBytes } from 'node:crypto';
import { LruPolicy } from '@kvtier/eviction';
import { type HashKey, hashKeyAt, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import { type ArenaTop, Store } from '@kvtier/placement';
import type { Clock } from '@kvtier/runtime';
import { Followers, type Tier, type TierChange, type TierStats, type WriteStatus } from '@kvtier/tiers';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, median, type Suite, time } from '../figures.ts';

const chainBlocks = 8192;
const chainCount = 122;
const blocks = chainBlocks * chainCount;
const arenaChains = 12;
/** Blocks that one prefill step of 512 tokens commits: chains of many engines are stored in turns, a piece each. */
const pieceBlocks = 32;
const hashBytes = 32;
/** Percentiles are taken per round; the median round counts, so that other processes disturb less. */
const rounds = 8;
const lookups = 150;
const cacheLineBytes = 64;

/** A tier that lists blocks and orders them by use. */
class ListTier {
  readonly supports = { persistent: false, shared: false, writable: true, evicts: true };
  readonly name: string;
  readonly #followers = new Followers();
  readonly #numbers = new Map<HashKey, number>();
  readonly #policy = new LruPolicy();

  constructor(name: string) {
    this.name = name;
  }

  add(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (const hash of hashes) {
      const number = this.#numbers.size;
      this.#numbers.set(hash, number);
      this.#policy.insert(number, 0);
    }
    this.#followers.stored(namespace, hashes);
  }

  touch(_namespace: Namespace, hashes: readonly HashKey[]): void {
    for (let at = hashes.length - 1; at >= 0; at--) this.#policy.touch(this.#numbers.get(hashes[at]!)!, 0);
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#followers.follow(listener, []);
  }

  lookup = (): number => 0;
  write = async (): Promise<WriteStatus[]> => [];
  read = async (): Promise<void> => {};
  isDue = (): boolean => false;
  remove = (): number => 0;
  checkIntegrity = (): void => {};
  close = async (): Promise<void> => {};
  stats = (): TierStats => ({
    ...{ tier: this.name, blocks: this.#numbers.size, bytes: 1, capacityBytes: 2 ** 40 },
    ...{ hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0, inService: true, outOfServiceReason: '' },
  });
}

/** Turns that the store has asked for run when the bench says so, between two lookups. */
class TurnClock implements Clock {
  readonly turns: (() => void)[] = [];

  nowUs(): number {
    return performance.now() * 1000;
  }

  wallMs(): number {
    return Date.now();
  }

  after(ms: number, fn: () => void): () => void {
    if (ms === 0) this.turns.push(fn);
    return () => {};
  }
}

const percentile = (values: readonly number[], share: number): number =>
  [...values].sort((a, b) => a - b)[Math.min(values.length - 1, Math.floor(values.length * share))]!;

/** Of the median round. */
const steady = (values: readonly number[], share: number): number => {
  const perRound = Math.floor(values.length / rounds);
  return median(
    Array.from({ length: rounds }, (_, at) => percentile(values.slice(at * perRound, (at + 1) * perRound), share)),
  );
};

const elapsedUs = (work: () => void): number => {
  const start = performance.now();
  work();
  return (performance.now() - start) * 1000;
};

async function run({ args, log }: BenchContext): Promise<Figure[]> {
  argumentsOf('store', args, {});
  const namespace = namespaceFromDigest(randomBytes(32));
  const arena = new ListTier('arena');
  const disk = new ListTier('disk');
  const clock = new TurnClock();
  const silent = { info: () => {}, warn: () => {}, error: () => {} };
  const store = new Store({
    arena: arena as unknown as ArenaTop,
    lower: [disk as Tier],
    readHeader: () => undefined,
    verify: async () => [],
    clock,
    log: silent,
  });
  const map = new Map<HashKey, number>();
  const chains = Array.from({ length: chainCount }, (_, number) => {
    const packed = randomBytes(chainBlocks * hashBytes);
    const keys = Array.from({ length: chainBlocks }, (_, at) => hashKeyAt(packed, at, hashBytes));
    for (const key of keys) map.set(key, number);
    return { packed, keys };
  });
  for (let at = 0; at < chainBlocks; at += pieceBlocks) {
    for (const [number, { keys }] of chains.entries()) {
      const piece = keys.slice(at, at + pieceBlocks);
      disk.add(namespace, piece);
      if (number < arenaChains) arena.add(namespace, piece);
    }
  }
  const holdings = store.open(namespace, 2 << 20, 16);
  const gauges = (): Readonly<Record<string, number>> => store.stats().counters;
  const indexBytes = gauges()['index.bytes']!;
  const table = new Uint32Array(indexBytes >>> 2).fill(1);
  const lines = Math.floor(indexBytes / cacheLineBytes);

  const found: number[] = [];
  const memory: number[] = [];
  const inMap: number[] = [];
  const turns: number[] = [];
  const recency: number[] = [];
  let sum = 0;
  for (let round = -50; round < rounds * lookups; round++) {
    const { packed } = chains[Math.floor(Math.random() * chainCount)]!;
    let held = 0;
    const lookupUs = elapsedUs(() => {
      held = store.lookup(holdings.state, { packed, hashBytes }).held;
    });
    if (held !== chainBlocks) throw new Error(`store bench: ${held} of ${chainBlocks} blocks found`);
    let recencyUs = 0;
    for (let turn = clock.turns.shift(); turn !== undefined; turn = clock.turns.shift()) {
      const us = elapsedUs(turn);
      if (round >= 0) turns.push(us);
      recencyUs += us;
    }
    if (round >= 0) found.push(lookupUs);
    if (round % 5 !== 0) continue;
    const places = Uint32Array.from({ length: chainBlocks }, () => Math.floor(Math.random() * lines) * 16);
    const memoryUs = elapsedUs(() => {
      for (let at = 0; at < chainBlocks; at++) sum += table[places[at]!]!;
    });
    const { packed: other } = chains[Math.floor(Math.random() * chainCount)]!;
    const mapUs = elapsedUs(() => {
      for (let at = 0; at < chainBlocks; at++) if (map.has(hashKeyAt(other, at, hashBytes))) sum++;
    });
    if (round < 0) continue; // warming the compiler up
    memory.push(memoryUs);
    inMap.push(mapUs);
    recency.push(recencyUs);
  }
  const bytesPerBlock = gauges()['index.bytes']! / gauges()['index.blocks']!;
  const keyBytes = 17; // 128 bits of name, 8 bits of tiers
  log(`${blocks} blocks indexed, ${bytesPerBlock.toFixed(1)} bytes each; bare Map p50 ${median(inMap).toFixed(0)} µs`);
  log(`recency of one lookup, told in later turns: ${median(recency).toFixed(0)} µs in all (sum ${sum})`);
  const memoryName = `${chainBlocks} random reads of a table of ${(indexBytes / 2 ** 20).toFixed(0)} MiB`;
  return [
    time('lookup_128k_p50', steady(found, 0.5), 'us', median(memory), memoryName),
    time('lookup_128k_p99', steady(found, 0.99), 'us', 1000, 'required, 1 ms'),
    time('lookup_128k_p50_vs_map', steady(found, 0.5), 'us', median(inMap), 'bare Map, a string per hash'),
    time('recency_turn_p99', steady(turns, 0.99), 'us', 1000, 'a turn that others wait for, 1 ms'),
    time('index_bytes_per_block', bytesPerBlock, 'bytes', keyBytes, 'name and tiers alone, perfectly packed'),
  ];
}

const suite: Suite = {
  name: 'store',
  description: 'lookup of a 128k-token chain with 1,000,000 blocks indexed, and the index’s bytes per block',
  run,
};

export default suite;

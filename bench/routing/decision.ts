/**
 * What one decision costs in a large cluster: 64 workers with a cache node each, 10 million blocks indexed, a prompt of 100,000
 * tokens already hashed. Beside it, afterwards: the prompt's blocks looked up one by one in a Map. (In between, it would take from the
 * processor's caches what a coordinator's decisions find there.)
 */
import { foldsOf, type Keys, KvIndex, type Match, maxMedia, Targets } from '@kvtier/kv-index';
import { policies, type WorkerState } from '@kvtier/routing';
import { median } from '../figures.ts';
import { seeded } from './seeded.ts';

const workers = 64;
const promptBlocks = 6_250;
const prefixBlocks = 1_000;
const prefixes = 200;
const blocks = 10_000_000;
const chunkBlocks = 128;
/** One in a hundred of 400 differs by half from round to round, and so do a few rounds. */
const rounds = 25;
const mapRounds = 5;
/** Not counted: their code is not compiled yet. */
const warmRounds = 2;
const perRound = 400;

export interface DecisionCost {
  readonly p99Us: number;
  readonly p50Us: number;
  /** The blocks of one prompt in a Map, one by one. */
  readonly mapP50Us: number;
  readonly indexBytes: number;
  /** Blocks, times the places that hold each. */
  readonly copies: number;
  readonly storeNs: number;
}

/** A prompt's hashes: some prompts begin alike. */
function promptKeys(prompt: number): Keys {
  const keys = new Int32Array(2 * promptBlocks);
  for (let i = 0; i < promptBlocks; i++) {
    const chain = i < prefixBlocks ? -1 - (prompt % prefixes) : prompt;
    let a = Math.imul(Math.imul(chain, 7919) + i * 104_729 + 1, 0x9e3779b1);
    a = Math.imul(a ^ (a >>> 15), 0x85ebca6b);
    keys[2 * i] = a;
    keys[2 * i + 1] = Math.imul(a ^ (i * 31 + chain), 0xc2b2ae35) ^ (chain << 7);
  }
  return keys;
}

/** As a request's keys come: made anew, with what the index checks them by (api-server's prompt-keys.ts). */
function asked(prompt: Keys): Keys {
  const keys = prompt.slice();
  foldsOf(keys);
  return keys;
}

export function decisionCost(): DecisionCost {
  const random = seeded(7);
  const below = (limit: number): number => Math.floor(random() * limit);
  const index = new KvIndex({ maxBytes: 2 ** 30 });
  const gpus = Array.from({ length: workers }, () => index.addSource());
  const nodes = Array.from({ length: workers }, () => index.addSource());
  const targets = new Targets(gpus.map((gpu, i) => ({ sources: [gpu, nodes[i]!] })));
  const prompts: Keys[] = [];
  let copies = 0;
  const begin = performance.now();
  while (index.stats().blocks < blocks) {
    const keys = promptKeys(prompts.length);
    prompts.push(keys);
    for (const share of [1, random()]) {
      const worker = below(workers);
      const until = Math.max(chunkBlocks, Math.floor(promptBlocks * share));
      for (let at = 0; at < until; at += chunkBlocks) {
        const part = keys.subarray(2 * at, 2 * Math.min(at + chunkBlocks, until));
        const parent = at === 0 ? 'root' : keys.subarray(2 * at - 2, 2 * at);
        index.stored(gpus[worker]!, 0, part, parent);
        index.stored(nodes[worker]!, 1, part, parent);
        copies += part.length;
      }
    }
  }
  const storeNs = ((performance.now() - begin) * 1e6) / copies;

  const policy = policies.predicted();
  // As the dispatcher does: a worker's state is kept, and what it holds of this prompt is put in.
  const nothing = { blocks: 0, byMedium: new Int32Array(maxMedia) };
  const states = gpus.map((_, i): { match: Match } & Omit<WorkerState, 'match'> => ({
    waiting: i % 3,
    running: i % 7,
    tokensAhead: (i * 977) % 5_000,
    usedBlocks: 100,
    totalBlocks: 50_000,
    waitingBlocks: 0,
    freedBlocksPerS: 100,
    loadAheadS: 0,
    prefillTokensPerS: 20_000,
    stepForS: (i % 8) / 1_000,
    stepS: 0.008,
    stepPerRequestS: 0.0001,
    loadBlocksPerS: new Array<number>(maxMedia).fill(1_000),
    match: nothing,
    remoteBlocks: 0,
    remoteMedium: 3,
  }));
  const decide = (keys: Keys): void => {
    const matches = index.match(keys, targets);
    for (let i = 0; i < workers; i++) states[i]!.match = matches[i]!;
    const request = { tokens: promptBlocks * 16, maxTokens: 100, blockTokens: 16, keys, session: '' };
    policy.choose(request, states, 0, random);
  };
  const p50: number[] = [];
  const p99: number[] = [];
  const mapTimes: number[] = [];
  for (let round = -warmRounds; round < rounds; round++) {
    // Hashes that were just computed lie in the processor's cache, and the index in memory.
    const times = timed(
      perRound,
      () => asked(prompts[below(prompts.length)]!),
      (keys) => decide(keys),
    );
    if (round < 0) continue;
    p50.push(times[Math.floor(perRound * 0.5)]!);
    p99.push(times[Math.floor(perRound * 0.99)]!);
  }
  const map = new Map<number, number>();
  for (const keys of prompts.slice(0, 300)) for (let i = 0; i < promptBlocks; i++) map.set(keys[2 * i]!, i);
  for (let round = 0; round < mapRounds; round++) {
    let found = 0;
    const one = timed(
      20,
      () => prompts[below(300)]!.slice(),
      (keys) => {
        for (let i = 0; i < promptBlocks; i++) found += map.has(keys[2 * i]!) ? 1 : 0;
      },
    );
    mapTimes.push(found > 0 ? one[10]! : Number.NaN);
  }
  return {
    p50Us: median(p50),
    p99Us: median(p99),
    mapP50Us: median(mapTimes),
    indexBytes: index.stats().bytes,
    copies,
    storeNs,
  };
}

/** Ascending, µs. */
function timed(times: number, given: () => Keys, work: (keys: Keys) => void): Float64Array {
  const taken = new Float64Array(times);
  for (let i = 0; i < times; i++) {
    const keys = given();
    const begin = performance.now();
    work(keys);
    taken[i] = (performance.now() - begin) * 1000;
  }
  return taken.sort();
}

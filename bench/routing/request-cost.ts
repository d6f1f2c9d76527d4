/**
 * CPU that the coordinator spends on a request of 100,000 tokens in a cluster of 64 workers and 10 million indexed blocks: the
 * prompt's token ids are hashed, looked up in the KV index, and the dispatcher chooses a worker. Reading the request and passing on
 * the answer are not in it.
 */

import { Dispatcher, type DispatchRequest } from '@kvtier/dispatch';
import { FakeWorkers } from '@kvtier/dispatch/testing';
import { ChainHasher, type HashAlgorithm } from '@kvtier/identity';
import { type Keys, KvIndex, keysOfHashes, type Target } from '@kvtier/kv-index';
import { median } from '../figures.ts';
import { seeded } from './seeded.ts';

const workerCount = 64;
const promptTokens = 100_000;
const prefixTokens = 16_000;
const prefixes = 200;
const blockTokens = 16;
const blocks = 10_000_000;
const rounds = 5;
/** Not counted: the first few hundred requests of a process run code that is not compiled yet. */
const warmRounds = 10;
const perRound = 60;
const never = new AbortController().signal;

export interface RequestCost {
  /** Medians of the rounds, in milliseconds of this process's CPU time a request. */
  readonly cpuMs: number;
  /** Of that, hashing. */
  readonly hashMs: number;
}

/** Some prompts begin alike. */
function promptOf(number: number): Uint32Array {
  const tokens = new Uint32Array(promptTokens);
  fill(tokens, 0, prefixTokens, 1 + (number % prefixes));
  fill(tokens, prefixTokens, promptTokens, 1_000_003 + number);
  return tokens;
}

function fill(tokens: Uint32Array, from: number, to: number, seed: number): void {
  let state = Math.imul(seed, 0x9e3779b1) >>> 0;
  for (let i = from; i < to; i++) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    tokens[i] = (state >>> 8) % 128_000;
  }
}

export async function requestCost(algorithm: HashAlgorithm): Promise<RequestCost> {
  const random = seeded(11);
  const below = (limit: number): number => Math.floor(random() * limit);
  const hasher = new ChainHasher({ algorithm, blockTokens });
  const keysOf = (tokens: Uint32Array): Keys => keysOfHashes(hasher.hashBlocks(null, tokens), hasher.hashBytes);
  const index = new KvIndex({ maxBytes: 2 ** 30 });
  const targets: Target[] = [];
  const workers = new FakeWorkers();
  for (let i = 0; i < workerCount; i++) {
    targets.push({ sources: [index.addSource(), index.addSource()] });
    workers.add(
      `w${i}`,
      { totalBlocks: 50_000, hashAlgorithm: algorithm },
      { tokensAhead: below(2_000), running: below(30), stepBegunAtMs: 1 + below(20) },
    );
  }
  let prompts = 0;
  for (; index.stats().blocks < blocks; prompts++) {
    const keys = keysOf(promptOf(prompts));
    const [gpu, node] = targets[below(workerCount)]!.sources;
    index.stored(gpu!, 0, keys, 'root');
    index.stored(node!, 1, keys, 'root');
  }
  const dispatcher = new Dispatcher({
    workers,
    holdings: {
      match: (_model, keys, numbers) =>
        index.match(
          keys,
          numbers.map((number) => targets[number]!),
        ),
    },
    random,
  });
  const cpuMs: number[] = [];
  const hashMs: number[] = [];
  for (let round = -warmRounds; round < rounds; round++) {
    const asked = Array.from({ length: perRound }, () => promptOf(below(prompts)));
    let began = process.cpuUsage();
    for (const tokens of asked) {
      const choice = await dispatcher.choose(requestOf(keysOf(tokens)), never);
      choice.firstToken();
      choice.ended();
    }
    const allMs = since(began);
    began = process.cpuUsage();
    for (const tokens of asked) keysOf(tokens);
    if (round < 0) continue;
    cpuMs.push(allMs);
    hashMs.push(since(began));
  }
  dispatcher.close();
  return { cpuMs: median(cpuMs) / perRound, hashMs: median(hashMs) / perRound };
}

function since(began: NodeJS.CpuUsage): number {
  const { user, system } = process.cpuUsage(began);
  return (user + system) / 1000;
}

const nobody: ReadonlySet<string> = new Set();
const requestOf = (keys: Keys): DispatchRequest => ({
  id: 'request',
  model: 'demo',
  among: undefined,
  except: nobody,
  tokens: promptTokens,
  maxTokens: 100,
  blockTokens,
  keys,
  session: '',
});

/**
 * The engine's prefix cache at 200,000 blocks of 16 tokens and requests of 32k tokens, per block: hash, lookup, allocation
 * into unused and into cached blocks, release; beside the same algorithms in plain Python (scripts/prefix_cache_reference.py)
 * in the same run, with and without events and a sliding-window group. Then a scheduler's step with 256 running requests,
 * and the heap over many steps. Rounds alternate; figures are medians; both sides' last hash is compared.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { createInterface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { KvError } from '@kvtier/errors';
import { ChainHasher, SequenceHashes } from '@kvtier/identity';
import { type AttentionSpec, type CacheRequest, KvCacheManager } from '@kvtier/prefix-cache';
import { Engine, noConnector } from '@kvtier/scheduler';
import { argumentsOf } from '../arguments.ts';
import { type Figure, median, type Suite, time } from '../figures.ts';
import { IdleExecutor } from '../idle-executor.ts';

const blockCount = 200_000;
const blockTokens = 16;
const requestTokens = 32_768;
const blocks = requestTokens / blockTokens;
const windowTokens = 1024;
const evictingTurns = 12;
const rounds = 3;
const stepRequests = 256;
/** Memory is watched over this many steps of so many requests. */
const soakSteps = 1_000_000;
const soakRequests = 16;
/** Readings of the heap, of which the low points of the second and the last third are compared. */
const soakHeapSamples = 60;

type Case = 'hash' | 'cold' | 'warm' | 'unused' | 'evicting' | 'free';
type Times = Record<Case, number>;
interface Setting {
  readonly name: string;
  readonly window: number;
  readonly events: boolean;
}
const settings: readonly Setting[] = [
  { name: 'full', window: 0, events: false },
  { name: 'full_events', window: 0, events: true },
  { name: 'window', window: windowTokens, events: false },
  { name: 'window_events', window: windowTokens, events: true },
];

/** The Python process, one question at a time. */
class Reference {
  readonly #child: ChildProcess;
  readonly #lines: AsyncIterator<string>;

  constructor() {
    const script = fileURLToPath(new URL('../scripts/prefix_cache_reference.py', import.meta.url));
    this.#child = spawn('/usr/bin/python3', [script], { stdio: ['pipe', 'pipe', 'inherit'] });
    this.#child.on('error', () => {}); // seen as the end of its output
    this.#child.stdin!.on('error', () => {});
    this.#lines = createInterface({ input: this.#child.stdout! })[Symbol.asyncIterator]();
  }

  async measure(setting: Setting, seed: number): Promise<Times & { last: string }> {
    const { window, events } = setting;
    const ask = { blocks: blockCount, blockTokens, requestTokens, window, events, seed, turns: evictingTurns };
    this.#child.stdin!.write(`${JSON.stringify(ask)}\n`);
    const line = await this.#lines.next();
    if (line.done) {
      throw new KvError('SETUP', '/usr/bin/python3 with cbor2 does not run; install it: apt-get install python3-cbor2');
    }
    return JSON.parse(line.value) as Times & { last: string };
  }

  close(): void {
    this.#child.stdin!.end();
  }
}

/** The same linear congruential sequence as the Python script. */
function prompt(seed: number): Uint32Array {
  const tokens = new Uint32Array(requestTokens);
  let state = seed >>> 0;
  for (let i = 0; i < requestTokens; i++) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    tokens[i] = (state >>> 8) % 128_000;
  }
  return tokens;
}

function managerFor({ window, events }: Setting): KvCacheManager {
  const groups: AttentionSpec[] = [{ kind: 'full_attention', blockTokens }];
  if (window > 0) groups.push({ kind: 'sliding_window', blockTokens, windowTokens: window });
  return new KvCacheManager({
    blockTokens,
    blockCount,
    groups,
    maxModelTokens: 2 * requestTokens,
    enableEvents: events,
    // As vLLM's default: a window keeps what the ends of prompts need.
    retentionIntervalTokens: 0,
  });
}

/** One life of a pool: filled, then turned over. Medians per block, microseconds. */
function measureOurs(setting: Setting, seed: number, hasher: ChainHasher): Times & { last: string } {
  const manager = managerFor(setting);
  const spent: Record<Case, number[]> = { hash: [], cold: [], warm: [], unused: [], evicting: [], free: [] };
  const fills = Math.floor(blockCount / (blocks * (setting.window > 0 ? 2 : 1)));
  let last = '';
  for (let turn = 0; turn < fills + 1 + evictingTurns; turn++) {
    const tokens = prompt(seed + turn);
    const ids = Array.from(tokens);
    const start = performance.now();
    const hashes = new SequenceHashes(hasher);
    hashes.append(tokens);
    const hashed = performance.now();
    const request: CacheRequest = {
      id: String(turn),
      tokenCount: requestTokens,
      promptTokens: requestTokens,
      computedTokens: 0,
      running: false,
      hashes,
      description: {
        loraId: null,
        loraName: null,
        tokenIds: (first, end) => ids.slice(first, end),
        extraKeys: () => null,
      },
    };
    const cold = manager.getComputedBlocks(request);
    const looked = performance.now();
    const added = manager.allocateSlots(request, requestTokens, { computed: cold });
    manager.takeEvents(); // removals get their keys here: part of what events cost
    const ran = performance.now();
    manager.free(request.id);
    const freed = performance.now();
    const warm = manager.getComputedBlocks(request);
    const end = performance.now();
    if (added === null || cold.tokens !== 0 || warm.tokens !== requestTokens - blockTokens) {
      throw new KvError('CORRUPT', `prefix-cache bench: ${warm.tokens} tokens hit, the measurement is void`);
    }
    spent.hash.push(hashed - start);
    spent.cold.push(looked - hashed);
    if (turn !== fills) spent[turn < fills ? 'unused' : 'evicting'].push(ran - looked);
    spent.free.push(freed - ran);
    spent.warm.push(end - freed);
    last = hashes.slice(blocks - 1).toString('hex');
  }
  const times = Object.entries(spent).map(([name, values]) => [name, (median(values) / blocks) * 1000]);
  return { ...(Object.fromEntries(times) as Times), last };
}

/**
 * Whole steps of the engine with requests that decode, from one step's start to the next one's: scheduling, slots, hashes
 * of blocks that became full, outputs. A request that ends makes room for a new one.
 */
async function measureSteps(
  requests: number,
  steps: number,
  /** How often the heap is looked at after a collection: none of the steps meets one of its own accord then. */
  heapSamples: number,
): Promise<{ medianUs: number; p99Us: number; heapGrowthBytes: number }> {
  const executor = new IdleExecutor({ blockCount, blockTokens });
  const engine = new Engine({
    executor,
    connector: noConnector,
    hasher: new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }),
    eosTokenIds: [],
    limits: { maxStepTokens: 8192, maxSequences: requests, maxWaiting: requests },
  });
  const prompts = Array.from({ length: 64 }, (_, i) => Int32Array.from(prompt(i).subarray(0, 256 + (i % 7) * 64)));
  let born = 0;
  const submit = (): void => {
    const which = born++;
    const promptTokenIds = prompts[which % prompts.length]!.slice();
    promptTokenIds[0] = which % 30_000; // nothing is shared
    const maxTokens = 300 + (which % 101);
    const params = { temperature: 0, topK: 0, topP: 1, ignoreEos: true };
    engine.submit({ requestId: String(which), promptTokenIds, maxTokens, ...params }, ({ finishReason }) => {
      if (finishReason === 'length' && taken < steps) submit();
    });
  };
  const times = new Float64Array(Math.min(steps, 200_000));
  let taken = 0;
  let last = 0;
  const heap = (): number => {
    setFlagsFromString('--expose-gc');
    (runInNewContext('gc') as () => void)();
    return process.memoryUsage().heapUsed + process.memoryUsage().arrayBuffers;
  };
  // The heap swings with the requests that happen to live; its low points do not, unless something is kept.
  const heaps: number[] = [];
  const heapEvery = heapSamples === 0 ? Number.POSITIVE_INFINITY : Math.max(Math.floor(steps / heapSamples), 1);
  await new Promise<void>((resolve) => {
    executor.onStep = () => {
      const now = performance.now();
      if (taken < times.length) times[taken] = now - last;
      if (++taken % heapEvery === 0) heaps.push(heap());
      if (taken === steps) resolve();
      last = performance.now();
    };
    for (let i = 0; i < requests; i++) submit();
  });
  const low = (first: number, end: number): number =>
    Math.min(...heaps.slice(Math.floor(heaps.length * first), Math.floor(heaps.length * end)));
  const heapGrowthBytes = low(2 / 3, 1) - low(1 / 3, 2 / 3);
  await engine.close();
  const sorted = times.slice(times.length >> 2).sort();
  const at = (share: number): number => sorted[Math.floor(sorted.length * share)]! * 1000;
  return { medianUs: at(0.5), p99Us: at(0.99), heapGrowthBytes };
}

const suite: Suite = {
  name: 'prefix-cache',
  description: "the engine's prefix cache per block, against plain Python; a scheduler's step; memory over many steps",
  needs: ['python3-cbor2'],
  async run(context) {
    const { number: steps = 20_000 } = argumentsOf('prefix-cache', context.args, { number: 'STEPS' });
    const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
    const figures: Figure[] = [];
    const reference = new Reference();
    try {
      for (const setting of settings) {
        const ours: Times[] = [];
        const python: Times[] = [];
        for (let round = 0; round < rounds; round++) {
          const seed = 1 + round * 1000;
          const peer = await reference.measure(setting, seed);
          const own = measureOurs(setting, seed, hasher);
          if (own.last !== peer.last) throw new KvError('CORRUPT', `hashes differ: ${own.last}, not ${peer.last}`);
          python.push(peer);
          ours.push(own);
        }
        const of = (times: readonly Times[], name: Case): number => median(times.map((one) => one[name]));
        const cases: readonly Case[] = ['hash', 'warm', 'unused', 'evicting', 'free'];
        for (const name of cases) {
          figures.push(time(`${setting.name}_${name}`, of(ours, name), 'µs/block', of(python, name), 'plain Python'));
        }
        const sum = (times: readonly Times[]): number =>
          (['hash', 'warm', 'evicting', 'free'] as const).reduce((total, name) => total + of(times, name), 0);
        figures.push(time(`${setting.name}_sum`, sum(ours), 'µs/block', sum(python), 'plain Python: target 10 x'));
      }
    } finally {
      reference.close();
    }
    const { medianUs, p99Us } = await measureSteps(stepRequests, steps, 0);
    // Steps are what counts here, not how many requests share one.
    const { heapGrowthBytes } = await measureSteps(soakRequests, soakSteps, soakHeapSamples);
    figures.push(time('step_256_median', medianUs, 'µs', 1000, 'target: 1 ms'));
    figures.push(time('step_256_p99', p99Us, 'µs', 1000, 'target: 1 ms'));
    const grown = Math.max(heapGrowthBytes / 1024, 1);
    figures.push(time('heap_growth', grown, 'KiB', 2048, `2 MiB of noise, last third of ${soakSteps} steps`));
    return figures;
  },
};

export default suite;

/**
 * A cluster in virtual time: requests of a trace arrive, a policy chooses a worker for each with what the KV index and the
 * workers' loads say, workers compute. Everything follows from the trace, the policy and a seed.
 */
import { type Keys, KvIndex, type Match, maxMedia } from '@kvtier/kv-index';
import { expectedLoads, usualLoads } from '@kvtier/registry';
import {
  AnswerLengths,
  type Assignment,
  Budget,
  type Copy,
  CopyPlanner,
  LateBinding,
  type Policy,
  type Random,
  type RoutedRequest,
  type WorkerState,
  workS,
} from '@kvtier/routing';
import type { Trace } from '../traces.ts';
import { EventQueue } from './event-queue.ts';
import type { Hardware } from './hardware.ts';
import { seeded } from './seeded.ts';
import { saturatedThroughput, throughput } from './throughput.ts';
import { type Job, type Listener, SimulatedWorker } from './worker.ts';

/** By the index's numbers. */
export const mediumNumbers = { gpu: 0, host: 1, peer: 3 } as const;

export interface Outcome {
  /** Of each request, in the order of arrival, seconds. */
  readonly ttftS: Float64Array;
  /** From the first arrival to the last answer's end. */
  readonly makespanS: number;
  readonly promptTokens: number;
  /** Prompt tokens a second (throughput.ts); and were they all there from the beginning. */
  readonly tokensPerS: number;
  readonly saturatedTokensPerS: number;
  /** Of the prompt tokens, found on the worker's GPU or its host; brought from another host. */
  readonly localTokens: number;
  /** Of these, brought up from the host's memory. */
  readonly hostTokens: number;
  readonly peerTokens: number;
  /** Copied ahead to another host. */
  readonly copiedTokens: number;
  /** Largest share of all work that one worker had, times the number of workers: 1 is balanced. */
  readonly imbalance: number;
  /** Longest and median decision, µs of this machine. */
  readonly decisionUs: Float64Array;
  /** 0: the policy does not ask the KV index. */
  readonly indexBytes: number;
}

/** Two words a block, from its number in the trace. */
export function keysOf(blocks: Int32Array): Keys {
  const keys = new Int32Array(2 * blocks.length);
  for (let i = 0; i < blocks.length; i++) {
    keys[2 * i] = Math.imul(blocks[i]! + 1, 0x9e3779b1);
    keys[2 * i + 1] = Math.imul(blocks[i]! + 7, 0x85ebca6b) ^ 0x27d4eb2f;
  }
  return keys;
}

type Event =
  | { readonly kind: 'arrival'; readonly job: Job }
  | { readonly kind: 'steps'; readonly worker: number; readonly version: number }
  | { readonly kind: 'loaded'; readonly worker: number; readonly job: Job }
  | { readonly kind: 'look' }
  | { readonly kind: 'copied'; readonly copy: Copy<Int32Array> };

const nothing: Match = { blocks: 0, byMedium: new Int32Array(maxMedia) };

/** Between two looks at what should be copied ahead. */
const lookS = 0.1;

/** `speed`: how many times as fast as recorded the requests come. */
export function simulate(
  trace: Trace,
  policy: Policy | 'late',
  hardware: Hardware,
  speed: number,
  seed: number,
): Outcome {
  return new Cluster(trace, policy, hardware, speed, seed).run();
}

class Cluster implements Listener {
  readonly #trace: Trace;
  /** `late`: requests wait in front of the workers. */
  readonly #policy: Policy | 'late';
  readonly #late = new LateBinding<Job>();
  readonly #budget: Budget;
  readonly #copies: CopyPlanner<Int32Array>;
  readonly #hardware: Hardware;
  readonly #random: Random;
  /** How long an answer will be nobody is told. */
  readonly #answers = new AnswerLengths();
  /** undefined: this policy does not ask it, and a run takes a third of the time without. */
  readonly #index: KvIndex | undefined;
  readonly #workers: SimulatedWorker[] = [];
  readonly #measured: number[][] = [];
  /** Numbers in the index: of each worker's GPU, and of its host. */
  readonly #gpus: number[] = [];
  readonly #hosts: number[] = [];
  readonly #events = new EventQueue<Event>();
  readonly #keys: Keys[];
  readonly #jobs: Job[];
  readonly #decisionUs: Float64Array;

  constructor(trace: Trace, policy: Policy | 'late', hardware: Hardware, speed: number, seed: number) {
    this.#trace = trace;
    this.#policy = policy;
    this.#hardware = hardware;
    this.#random = seeded(seed);
    const asksIndex = policy === 'late' || policy.asksIndex === true;
    this.#index = asksIndex ? new KvIndex({ maxBytes: 256 * 2 ** 20 }) : undefined;
    const { copyBytesPerS: bytesPerS, maxCopies: maxUnderWay } = hardware;
    this.#budget = new Budget({ bytesPerS: policy === 'late' ? bytesPerS : 0, maxUnderWay });
    this.#copies = new CopyPlanner({ budget: this.#budget, targetS: 2 });
    this.#keys = trace.requests.map(keysOf);
    this.#decisionUs = new Float64Array(trace.requests.length);
    for (let i = 0; i < hardware.workers; i++) {
      this.#workers.push(new SimulatedWorker(i, hardware, trace.blockTokens, this));
      this.#gpus.push(this.#index?.addSource() ?? 0);
      this.#hosts.push(this.#index?.addSource() ?? 0);
      this.#measured.push(new Array<number>(maxMedia).fill(0));
    }
    this.#jobs = trace.requests.map((blocks, number) => ({
      number,
      arrivedS: (trace.arrivalsMs[number]! - trace.arrivalsMs[0]!) / 1000 / speed,
      // Ids of blocks that are only begun are never found again.
      blocks: blocks.subarray(0, Math.floor(trace.inputTokens[number]! / trace.blockTokens)),
      inputTokens: Math.max(trace.inputTokens[number]!, 1),
      outputTokens: Math.max(trace.outputTokens[number]!, 1),
      ready: 0,
      held: 0,
      generated: 0,
      firstTokenS: -1,
      endedS: -1,
      found: { gpu: 0, host: 0, peer: 0 },
      expected: 0,
      expectedAnswer: 0,
    }));
  }

  run(): Outcome {
    for (const job of this.#jobs) this.#events.add(job.arrivedS, { kind: 'arrival', job });
    if (!this.#budget.isOff) this.#events.add(0, { kind: 'look' });
    while (this.#events.size > 0) {
      const { time, item } = this.#events.take();
      if (item.kind === 'arrival') this.#arrive(item.job, time);
      else if (item.kind === 'look') this.#lookAtCopies(time);
      else if (item.kind === 'copied') this.#copied(item.copy);
      else if (item.kind === 'loaded') {
        this.#workers[item.worker]!.loaded(item.job);
        this.#wake(item.worker, time);
        if (this.#policy === 'late') this.#bind(time);
      } else if (this.#workers[item.worker]!.version === item.version) {
        for (const job of this.#workers[item.worker]!.finish(time)) this.#ended(job);
        this.#begin(item.worker, time);
        if (this.#policy === 'late') this.#bind(time);
      }
    }
    return this.#outcome();
  }

  stored(worker: number, medium: number, job: Job, places: readonly number[]): void {
    if (this.#index === undefined) return;
    const keys = this.#keys[job.number]!;
    const source = (medium === 0 ? this.#gpus : this.#hosts)[worker]!;
    for (let i = 0; i < places.length; ) {
      let end = i + 1;
      while (end < places.length && places[end] === places[end - 1]! + 1) end++;
      const from = places[i]!;
      const parent = from === 0 ? 'root' : keys.subarray(2 * from - 2, 2 * from);
      this.#index.stored(source, medium, keys.subarray(2 * from, 2 * (from + end - i)), parent);
      i = end;
    }
  }

  removed(worker: number, medium: number, blocks: readonly number[]): void {
    this.#index?.removed((medium === 0 ? this.#gpus : this.#hosts)[worker]!, medium, keysOf(Int32Array.from(blocks)));
  }

  elsewhere(worker: number, job: Job, from: number): number {
    let longest = 0;
    for (const other of this.#workers) {
      if (other.number === worker) continue;
      let at = from;
      while (at < job.blocks.length && other.has('host', job.blocks[at]!)) at++;
      longest = Math.max(longest, at - from);
    }
    return longest;
  }

  /** Nothing else is to come: no copy would be of use. */
  #lookAtCopies(nowS: number): void {
    if (this.#events.size === 0) return;
    const { kvBytesPerToken, peerTokensPerS } = this.#hardware;
    const { blockTokens } = this.#trace;
    const statesFor = (request: RoutedRequest): WorkerState[] => this.#statesFor(request, nowS);
    for (const copy of this.#copies.look(nowS * 1000, blockTokens * kvBytesPerToken, statesFor, () => {})) {
      const seconds = (copy.brings * blockTokens) / peerTokensPerS;
      // Behind what requests wait for.
      const atS = nowS + this.#workers[copy.worker]!.loadAheadS(nowS) + seconds;
      this.#events.add(atS, { kind: 'copied', copy });
    }
    this.#events.add(nowS + lookS, { kind: 'look' });
  }

  #copied({ worker, kept }: Copy<Int32Array>): void {
    const { stored, removed } = this.#workers[worker]!.bring(kept);
    const source = this.#hosts[worker]!;
    const keys = keysOf(kept);
    for (const at of stored) {
      const parent = at === 0 ? 'root' : keys.subarray(2 * at - 2, 2 * at);
      this.#index?.stored(source, mediumNumbers.host, keys.subarray(2 * at, 2 * at + 2), parent);
    }
    if (removed.length > 0) this.removed(worker, mediumNumbers.host, removed);
  }

  #arrive(job: Job, nowS: number): void {
    const begin = performance.now();
    const request = this.#requestOf(job);
    if (!this.#budget.isOff) this.#copies.came(request, (blocks) => job.blocks.subarray(0, blocks), nowS * 1000);
    const states = this.#statesFor(request, nowS);
    if (this.#policy === 'late') {
      const needsS = Math.min(...states.map((state) => workS(request, state)));
      this.#late.add(job, request, nowS * 1000, needsS * 1000);
      this.#decisionUs[job.number] = (performance.now() - begin) * 1000;
      this.#bind(nowS);
      return;
    }
    const number = this.#policy.choose(request, states, nowS * 1000, this.#random);
    this.#decisionUs[job.number] = (performance.now() - begin) * 1000;
    this.#policy.sent?.(request, number, nowS * 1000);
    this.#send(job, number, states[number]!, nowS);
  }

  #bind(nowS: number): void {
    for (;;) {
      if (this.#late.size === 0) return;
      const next = this.#late.take((request) => this.#statesFor(request, nowS), nowS * 1000, this.#random);
      if (next === undefined) return;
      this.#send(next.item, next.worker, next.held, nowS);
    }
  }

  #send(job: Job, number: number, { match, remoteBlocks }: Assignment<Job>['held'], nowS: number): void {
    job.expected = Math.max(job.inputTokens - (match.blocks + remoteBlocks) * this.#trace.blockTokens, 1);
    this.#workers[number]!.enqueue(job);
    this.#wake(number, nowS);
  }

  #ended(job: Job): void {
    this.#answers.ended(job.outputTokens);
    this.#late.ended(job);
  }

  #requestOf(job: Job): RoutedRequest {
    job.expectedAnswer = this.#answers.expected(Number.POSITIVE_INFINITY);
    return {
      tokens: job.inputTokens,
      maxTokens: job.expectedAnswer,
      blockTokens: this.#trace.blockTokens,
      keys: this.#keys[job.number]!.subarray(0, 2 * job.blocks.length),
      session: '',
    };
  }

  #statesFor(request: RoutedRequest, nowS: number): WorkerState[] {
    const targets = this.#workers.map((_, i) => ({ sources: [this.#gpus[i]!, this.#hosts[i]!] }));
    const matches = this.#index?.match(request.keys, [...targets, { sources: this.#hosts }]) ?? [];
    const anywhere = this.#hardware.peerTokensPerS > 0 ? (matches.pop()?.blocks ?? 0) : 0;
    const usual = usualLoads(maxMedia, this.#measuredLoads());
    const computedBlocksPerS = this.#hardware.prefillTokensPerS / this.#trace.blockTokens;
    return this.#workers.map((worker, i) => ({
      waiting: worker.waiting,
      running: worker.running,
      tokensAhead: worker.tokensAhead,
      ...worker.step(nowS),
      usedBlocks: worker.usedBlocks,
      totalBlocks: worker.totalBlocks,
      waitingBlocks: worker.waitingBlocks,
      freedBlocksPerS: worker.freedBlocksPerS(nowS),
      maxRunning: this.#hardware.maxRunning,
      maxStepTokens: this.#hardware.stepTokens,
      loadAheadS: worker.loadAheadS(nowS),
      prefillTokensPerS: this.#hardware.prefillTokensPerS,
      stepS: this.#hardware.stepS,
      stepPerRequestS: this.#hardware.stepPerRequestS,
      loadBlocksPerS: expectedLoads(this.#measured[i]!, usual, computedBlocksPerS),
      match: matches[i] ?? nothing,
      remoteBlocks: Math.max(anywhere - (matches[i]?.blocks ?? 0), 0),
      remoteMedium: mediumNumbers.peer,
    }));
  }

  /** As each worker tells them: of media that it has brought something in from. */
  #measuredLoads(): readonly (readonly number[])[] {
    const { hostTokensPerS, peerTokensPerS } = this.#hardware;
    for (const { number, measured } of this.#workers) {
      const rates = this.#measured[number]!;
      if (measured.host) rates[mediumNumbers.host] = hostTokensPerS / this.#trace.blockTokens;
      if (measured.peer) rates[mediumNumbers.peer] = peerTokensPerS / this.#trace.blockTokens;
    }
    return this.#measured;
  }

  /** Something is to be done: at once, or after the step that runs. */
  #wake(number: number, nowS: number): void {
    const worker = this.#workers[number]!;
    if (worker.isIdle) this.#begin(number, nowS);
    else {
      const { version } = worker;
      worker.interrupt(nowS);
      if (worker.version !== version) this.#schedule(number);
    }
  }

  #begin(number: number, nowS: number): void {
    const loads = this.#workers[number]!.begin(nowS);
    for (const { job, atS } of loads) this.#events.add(atS, { kind: 'loaded', worker: number, job });
    this.#schedule(number);
  }

  #schedule(worker: number): void {
    const { endsS, version } = this.#workers[worker]!;
    if (endsS !== undefined) this.#events.add(endsS, { kind: 'steps', worker, version });
  }

  #outcome(): Outcome {
    const { blockTokens } = this.#trace;
    let end = 0;
    let promptTokens = 0;
    let local = 0;
    let host = 0;
    let peer = 0;
    for (const { endedS, inputTokens, found } of this.#jobs) {
      end = Math.max(end, endedS);
      promptTokens += inputTokens;
      local += (found.gpu + found.host) * blockTokens;
      host += found.host * blockTokens;
      peer += found.peer * blockTokens;
    }
    const busy = this.#workers.map(({ busyS }) => busyS);
    const all = busy.reduce((sum, s) => sum + s, 0);
    return {
      tokensPerS: throughput(this.#jobs, this.#hardware),
      saturatedTokensPerS: saturatedThroughput(this.#jobs),
      ttftS: Float64Array.from(this.#jobs, ({ arrivedS, firstTokenS }) => firstTokenS - arrivedS),
      makespanS: end,
      promptTokens,
      localTokens: local,
      hostTokens: host,
      peerTokens: peer,
      copiedTokens: this.#budget.bytes / this.#hardware.kvBytesPerToken,
      imbalance: (Math.max(...busy) * busy.length) / all,
      decisionUs: this.#decisionUs,
      indexBytes: this.#index?.stats().bytes ?? 0,
    };
  }
}

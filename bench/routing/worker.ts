/**
 * One simulated worker: an engine with continuous batching, chunked prefill and a prefix cache, and the memory of its host
 * below it. Time advances by whole steps; while nothing changes, many steps at once.
 *
 *     step = max(stepS, prompt tokens ÷ rate) + requests × stepPerRequestS
 */
import type { Hardware } from './hardware.ts';
import { Lru } from './lru.ts';

export interface Job {
  readonly number: number;
  readonly arrivedS: number;
  readonly blocks: Int32Array;
  readonly inputTokens: number;
  readonly outputTokens: number;
  /** Prompt tokens that are there: found, brought in, or computed. */
  ready: number;
  /** Leading blocks that it uses on the GPU. */
  held: number;
  generated: number;
  firstTokenS: number;
  endedS: number;
  /** Prompt tokens that were found on the GPU, brought from the host, from another host. */
  readonly found: { gpu: number; host: number; peer: number };
  /** What its worker was told that it will compute. */
  expected: number;
  /** Tokens of its answer, as they are expected when it comes. */
  expectedAnswer: number;
}

export interface Listener {
  /** Blocks of its chain, by their places in it, ascending. */
  stored(worker: number, medium: number, job: Job, places: readonly number[]): void;
  removed(worker: number, medium: number, blocks: readonly number[]): void;
  /** How many blocks from `from` on another host holds. */
  elsewhere(worker: number, job: Job, from: number): number;
}

export class SimulatedWorker {
  readonly number: number;
  readonly #hardware: Hardware;
  readonly #blockTokens: number;
  readonly #listener: Listener;
  readonly #gpu: Lru;
  readonly #host: Lru;
  readonly #waiting: Job[] = [];
  /** In the order of admission. */
  #running: Job[] = [];
  /** Whose loads ended while a step runs: they are part of the next one. */
  #arrived: Job[] = [];
  #loading = 0;
  /** Blocks that requests have beside those in the cache: what is not computed yet, and answers. */
  #privateBlocks = 0;
  #loadsEndS = 0;
  /** Blocks that are being brought to the GPU, and when each is there: who finds them there waits as well. */
  readonly #arrivesS = new Map<number, number>();
  /** The last requests that ended. */
  readonly #freed: { readonly atS: number; readonly blocks: number }[] = [];
  #unexpected = 0;
  /** The step, or steps, that run now. */
  #stepsBeginS = 0;
  #stepSeconds = 0;
  #steps = 0;
  /** Prompt tokens that it computes. */
  #stepTokens = 0;
  /** Counts up with each change, so that an event of before is known. */
  version = 0;
  /** How long its steps ran that have ended. */
  busyS = 0;
  /** Where it has brought something in from: how fast that is it knows from then on. */
  readonly measured = { host: false, peer: false };

  constructor(number: number, hardware: Hardware, blockTokens: number, listener: Listener) {
    this.number = number;
    this.#hardware = hardware;
    this.#blockTokens = blockTokens;
    this.#listener = listener;
    this.#gpu = new Lru(Math.floor(hardware.gpuTokens / blockTokens));
    this.#host = new Lru(Math.floor(hardware.hostTokens / blockTokens));
  }

  get waiting(): number {
    return (
      this.#waiting.length +
      this.#loading +
      this.#arrived.length +
      this.#running.filter(({ firstTokenS }) => firstTokenS < 0).length
    );
  }

  get running(): number {
    return this.#running.filter(({ firstTokenS }) => firstTokenS >= 0).length;
  }

  /** Prompt tokens still to be computed, as far as was told. */
  get tokensAhead(): number {
    let tokens = 0;
    for (const job of this.#waiting) tokens += job.expected;
    for (const job of this.#running) tokens += job.inputTokens - job.ready;
    for (const job of this.#arrived) tokens += job.inputTokens - job.ready;
    return tokens + this.#unexpected;
  }

  get usedBlocks(): number {
    return this.#gpu.held + this.#privateBlocks;
  }

  /** What those that wait will hold beside what is cached, as far as was told. */
  get waitingBlocks(): number {
    let blocks = 0;
    for (const job of this.#waiting) blocks += Math.ceil((job.expected + job.expectedAnswer) / this.#blockTokens);
    return blocks;
  }

  freedBlocksPerS(nowS: number): number {
    const first = this.#freed[0];
    if (first === undefined || this.#freed.length < 4) return 0;
    let blocks = 0;
    for (const one of this.#freed) blocks += one.blocks;
    return blocks / Math.max(nowS - first.atS, 1e-3);
  }

  loadAheadS(nowS: number): number {
    return Math.max(this.#loadsEndS - nowS, 0);
  }

  get totalBlocks(): number {
    return this.#gpu.capacity;
  }

  enqueue(job: Job): void {
    this.#waiting.push(job);
  }

  /** When the step that runs ends, or the steps; undefined: none runs. */
  get endsS(): number | undefined {
    return this.#steps === 0 ? undefined : this.#stepsBeginS + this.#steps * this.#stepSeconds;
  }

  /** Something came while steps ran: they end with the one that runs at `nowS`. */
  interrupt(nowS: number): void {
    if (this.#steps <= 1) return;
    this.#steps = Math.min(this.#steps, Math.floor((nowS - this.#stepsBeginS) / this.#stepSeconds) + 1);
    this.version++;
  }

  /** What was brought in is there; the request computes the rest. */
  loaded(job: Job): void {
    this.#loading--;
    this.#unexpected -= job.inputTokens - job.ready;
    this.measured.host ||= job.found.host > 0;
    this.measured.peer ||= job.found.peer > 0;
    for (let i = job.found.gpu; i < job.held; i++) this.#arrivesS.delete(job.blocks[i]!);
    this.#arrived.push(job);
  }

  /** Ends the steps that ran until now: tokens are there, requests may have ended. */
  finish(nowS: number): Job[] {
    const ended: Job[] = [];
    let budget = this.#hardware.stepTokens;
    for (const job of this.#running) {
      if (job.ready < job.inputTokens) {
        const tokens = Math.min(budget, job.inputTokens - job.ready);
        budget -= tokens;
        job.ready += tokens;
        this.#commit(job);
        if (job.ready < job.inputTokens) continue;
        job.firstTokenS = nowS;
        job.generated = 1;
      } else job.generated += this.#steps;
      if (job.generated >= job.outputTokens) {
        job.endedS = nowS;
        ended.push(job);
      }
    }
    // Not when they begin: those that an arrival cut off never ran.
    this.busyS += this.#steps * this.#stepSeconds;
    this.#steps = 0;
    this.#stepTokens = 0;
    for (const job of ended) {
      this.#free(job);
      this.#freed.push({ atS: nowS, blocks: this.#blocksOf(job) });
      if (this.#freed.length > 32) this.#freed.shift();
    }
    if (ended.length > 0) this.#running = this.#running.filter(({ endedS }) => endedS < 0);
    return ended;
  }

  /** Admits what fits and begins the next step; the loads that were begun, with the time when each is there. */
  begin(nowS: number): { readonly job: Job; readonly atS: number }[] {
    const loads: { job: Job; atS: number }[] = [];
    this.#running.push(...this.#arrived.splice(0));
    while (this.#waiting.length > 0 && this.#running.length + this.#loading < this.#hardware.maxRunning) {
      const job = this.#waiting[0]!;
      if (!this.#fits(job)) break;
      this.#waiting.shift();
      const atS = this.#admit(job, nowS);
      if (atS > nowS) {
        this.#loading++;
        this.#unexpected += job.inputTokens - job.ready;
        loads.push({ job, atS });
      } else this.#running.push(job);
    }
    this.version++;
    if (this.#running.length === 0) return loads;
    const { stepS, stepPerRequestS, stepTokens, prefillTokensPerS } = this.#hardware;
    let tokens = 0;
    let left = Number.POSITIVE_INFINITY;
    for (const job of this.#running) {
      if (job.ready < job.inputTokens) tokens = Math.min(stepTokens, tokens + job.inputTokens - job.ready);
      else left = Math.min(left, job.outputTokens - job.generated);
    }
    this.#stepTokens = tokens;
    this.#steps = tokens > 0 ? 1 : Math.max(left, 1);
    this.#stepSeconds = Math.max(stepS, tokens / prefillTokensPerS) + this.#running.length * stepPerRequestS;
    this.#stepsBeginS = nowS;
    return loads;
  }

  /** Of the step that runs: since when, and how many tokens of prompts it computes. */
  step(nowS: number): { readonly stepTokens?: number; readonly stepForS?: number } {
    if (this.#steps === 0) return {};
    return { stepTokens: this.#stepTokens, stepForS: (nowS - this.#stepsBeginS) % this.#stepSeconds };
  }

  has(medium: 'gpu' | 'host', block: number): boolean {
    return (medium === 'gpu' ? this.#gpu : this.#host).has(block);
  }

  /** A chain came from another host into its host's memory, ahead of requests; places that are new there, and blocks that went. */
  bring(blocks: Int32Array): { readonly stored: number[]; readonly removed: number[] } {
    const stored: number[] = [];
    for (let i = blocks.length - 1; i >= 0; i--) {
      if (!this.#host.has(blocks[i]!)) stored.unshift(i);
      this.#host.use(blocks[i]!);
    }
    return { stored, removed: this.#host.shrink(0) };
  }

  get isIdle(): boolean {
    return this.#steps === 0;
  }

  #blocksOf(job: Job): number {
    return Math.ceil((job.inputTokens + job.outputTokens) / this.#blockTokens);
  }

  /** Blocks that others use as well are there once. */
  #fits(job: Job): boolean {
    if (this.#running.length === 0 && this.#loading === 0) return true;
    const { blocks } = job;
    let shared = 0;
    while (shared < blocks.length && this.#gpu.isUsed(blocks[shared]!)) shared++;
    return this.usedBlocks + this.#blocksOf(job) - shared <= this.#gpu.capacity;
  }

  /** Looks the prompt up; when it can go on. */
  #admit(job: Job, nowS: number): number {
    const { blocks } = job;
    let at = 0;
    while (at < blocks.length && this.#gpu.has(blocks[at]!)) this.#gpu.use(blocks[at++]!, 1);
    job.found.gpu = at;
    const gpu = at;
    while (at < blocks.length && this.#host.has(blocks[at]!)) at++;
    job.found.host = at - gpu;
    const host = at;
    const { hostTokensPerS, peerTokensPerS, prefillTokensPerS } = this.#hardware;
    if (peerTokensPerS > prefillTokensPerS) at += this.#listener.elsewhere(this.number, job, at);
    else this.measured.peer = true; // its planner weighs it, and says what it expects
    job.found.peer = at - host;
    job.held = gpu;
    job.ready = gpu * this.#blockTokens;
    this.#privateBlocks += this.#blocksOf(job) - gpu;
    // The last token is always computed.
    if (at > gpu) {
      const seconds =
        (job.found.host * this.#blockTokens) / hostTokensPerS + (job.found.peer * this.#blockTokens) / peerTokensPerS;
      this.#loadsEndS = Math.max(this.#loadsEndS, nowS) + seconds;
      job.ready = at * this.#blockTokens;
      this.#commit(job);
      for (let i = gpu; i < at; i++) this.#arrivesS.set(blocks[i]!, this.#loadsEndS);
    }
    job.ready = Math.min(job.ready, job.inputTokens - 1);
    if (at > gpu) return this.#loadsEndS;
    // A chain comes in its order: its last block is the latest.
    return Math.max(nowS, gpu === 0 ? 0 : (this.#arrivesS.get(blocks[gpu - 1]!) ?? 0));
  }

  /** Full blocks that became ready are in the cache, and go down to the host. */
  #commit(job: Job): void {
    const to = Math.min(Math.floor(job.ready / this.#blockTokens), job.blocks.length);
    if (to <= job.held) return;
    const from = job.held;
    const fresh: number[] = [];
    const freshBelow: number[] = [];
    for (let i = from; i < to; i++) {
      const block = job.blocks[i]!;
      if (!this.#gpu.has(block)) fresh.push(i);
      if (!this.#host.has(block)) freshBelow.push(i);
      this.#gpu.use(block, 1);
    }
    for (let i = to - 1; i >= from; i--) this.#host.use(job.blocks[i]!);
    job.held = to;
    this.#privateBlocks -= to - from;
    if (fresh.length > 0) this.#listener.stored(this.number, 0, job, fresh);
    if (freshBelow.length > 0) this.#listener.stored(this.number, 1, job, freshBelow);
    const gone = this.#gpu.shrink(this.#privateBlocks);
    if (gone.length > 0) this.#listener.removed(this.number, 0, gone);
    const goneHost = this.#host.shrink(0);
    if (goneHost.length > 0) this.#listener.removed(this.number, 1, goneHost);
  }

  #free(job: Job): void {
    // Children first: a chain is evicted from its tail.
    for (let i = job.held - 1; i >= 0; i--) {
      this.#gpu.use(job.blocks[i]!);
      this.#gpu.release(job.blocks[i]!);
      if (this.#host.has(job.blocks[i]!)) this.#host.use(job.blocks[i]!);
    }
    this.#privateBlocks -= this.#blocksOf(job) - job.held;
  }
}

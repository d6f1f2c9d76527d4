/**
 * The engine: requests in, tokens out. One loop puts a step together, runs it on the executor's native threads, and
 * hands out what it drew. While a step runs the event loop is free: requests arrive, are hashed and looked up in the
 * tier, and loads and exports end.
 *
 * Invariants: every submitted request ends with exactly one output that has a finish reason or an error; a failed step
 * fails the requests in it and no others; the loop sleeps only when nothing can be computed, and whatever changes that
 * wakes it.
 */
import { randomBytes } from 'node:crypto';
import { InvariantError, KvError } from '@kvtier/errors';
import type { Step, StepResult } from '@kvtier/executor';
import type { ChainHasher } from '@kvtier/identity';
import { type KvCacheEvent, KvCacheManager, type PrefixCache, RadixCache } from '@kvtier/prefix-cache';
import { attentionSpecs, hasWindows, longestSequence } from './attention-groups.ts';
import { buildStep, type Share, samples } from './batch.ts';
import { cacheUseOf } from './cache-use.ts';
import { CheckedHashes, contentHasher } from './checked-hashes.ts';
import type { EngineLoadFigures } from './engine-load.ts';
import { checkOptions, type EngineOptions } from './engine-options.ts';
import { EngineRequest } from './request.ts';
import { Scheduler } from './scheduler.ts';
import {
  type CacheUse,
  type Clock,
  type EngineStats,
  type GenerateRequest,
  type HandOffState,
  type OnOutput,
  type Output,
  systemClock,
} from './types.ts';
import { checkRequest, noTier } from './validate.ts';

/** How long close waits for the connector to let go of blocks. */
const closeDeadlineMs = 5_000;

export class Engine {
  /** Prompt and answer together are never longer: the model's limit, or what the block pool holds. */
  readonly maxTotalTokens: number;
  readonly #options: EngineOptions;
  readonly #clock: Clock;
  readonly #kv: PrefixCache;
  /** The same, when it is the pool of hashed blocks. */
  readonly #blocks: KvCacheManager | undefined;
  /** Where hashes can collide, content is compared by digests. */
  readonly #digester: ChainHasher | undefined;
  readonly #scheduler: Scheduler;
  readonly #requests = new Map<string, EngineRequest>();
  readonly #counts = {
    steps: 0,
    failedSteps: 0,
    prefillTokens: 0,
    decodeTokens: 0,
    finished: 0,
    aborted: 0,
    failed: 0,
    prefills: 0,
    prefilledBlocks: 0,
  };
  readonly #loop: Promise<void>;
  #arrivals = 0;
  #woken = false;
  #resume: (() => void) | undefined;
  /** Nothing new is taken; what is here goes on. */
  #draining = false;
  /** Why nothing is served any more. */
  #ended: KvError | undefined;
  #closed: Promise<void> | undefined;

  constructor(options: EngineOptions) {
    const { executor, limits } = options;
    const { blockTokens } = executor.kv;
    if (options.hasher.blockTokens !== blockTokens) {
      const found = `${options.hasher.blockTokens} tokens, the executor's blocks ${blockTokens}`;
      throw new KvError('CONFIG', `engine: the hasher's blocks have ${found}; configure one block size`);
    }
    if (executor.blockCount < 2)
      throw new KvError('CONFIG', `engine: a pool of ${executor.blockCount} blocks holds nothing; raise kvBytes`);
    this.#options = options;
    this.#clock = options.clock ?? systemClock;
    const groups = attentionSpecs(executor.kv);
    const maxPinnedBlocks = options.maxPinnedBlocks ?? 0;
    const { model, kv } = executor;
    const unpinned = { model, kv, blockCount: executor.blockCount - maxPinnedBlocks };
    this.maxTotalTokens = longestSequence(groups, unpinned, limits.maxStepTokens);
    if (this.maxTotalTokens === 0) {
      const found = `a pool of ${executor.blockCount} blocks does not hold one window of ${groups.length} groups`;
      throw new KvError('CONFIG', `engine: ${found} and a step's tokens; raise kvBytes or lower maxStepTokens`);
    }
    checkOptions(options, groups);
    const windows = hasWindows(groups);
    const cacheOptions = {
      blockCount: executor.blockCount,
      blockTokens,
      maxModelTokens: this.maxTotalTokens,
      enableEvents: options.enableEvents ?? (options.onEvents ?? options.onPackedEvents) !== undefined,
    };
    const { writeDownAheadBlocks } = options;
    if (options.prefixCache === 'radix') {
      this.#kv = new RadixCache({ ...cacheOptions, policy: options.radixPolicy ?? 'lru' });
    } else {
      this.#digester = contentHasher(options.hasher);
      this.#blocks = new KvCacheManager({
        ...cacheOptions,
        groups,
        maxInFlightTokens: limits.maxStepTokens,
        evictionPolicy: options.evictionPolicy,
        dedupBlocks: options.dedupBlocks ?? false,
        compareContent: this.#digester !== undefined,
        maxPinnedBlocks,
      });
      this.#kv = this.#blocks;
    }
    this.#scheduler = new Scheduler({
      kv: this.#kv,
      connector: options.connector,
      clock: this.#clock,
      maxStepTokens: limits.maxStepTokens,
      maxSequences: Math.min(limits.maxSequences, limits.maxStepTokens), // each running request gets a token a step
      maxExportBlocks: Math.max(1, Math.floor((limits.exportShare ?? 0.5) * (executor.blockCount - 1))),
      // Where layers see windows, each chunk's end is a place for a hit.
      exportGatherBlocks: windows ? 1 : (limits.exportGatherBlocks ?? 512),
      ahead:
        this.#blocks && writeDownAheadBlocks !== undefined
          ? { kv: this.#blocks, hashBytes: options.hasher.hashBytes, aheadBlocks: writeDownAheadBlocks }
          : undefined,
      matchDeadlineMs: limits.matchDeadlineMs ?? 2_000,
      loadDeadlineMs: limits.loadDeadlineMs ?? 30_000,
      windows,
      importsByLayer: executor.importsByLayer && !windows,
      wake: () => this.wake(),
      // The scheduler is at work: the caller hears of it when the step has begun.
      onHandOff: (request, localBlocks) => queueMicrotask(() => this.#tell(request, { localBlocks, readyBlocks: 0 })),
      onReady: (request, readyBlocks) => this.#tell(request, { localBlocks: 0, readyBlocks }),
      onPrefilled: (request, readyBlocks) => this.#prefilled(request, readyBlocks),
    });
    this.#loop = this.#run();
  }

  /**
   * Take a request in; its outputs follow, from the loop. Throws KvError: REQUEST (cannot be served as asked), TOO_LONG
   * (could never fit), BUSY (as many wait as may), CANCELLED (the engine drains or is closing), DISCONNECTED (prefillOnly, and
   * there is no tier to give the blocks to).
   */
  submit(params: GenerateRequest, onOutput: OnOutput): void {
    const { executor, hasher, limits, eosTokenIds } = this.#options;
    if (this.#ended) throw this.#ended;
    if (this.#draining)
      throw new KvError('CANCELLED', 'engine: is draining; send the request to another one', { retry: true });
    const { blockTokens } = executor.kv;
    checkRequest(params, { vocabSize: executor.model.vocabSize, maxTotalTokens: this.maxTotalTokens, blockTokens });
    if (params.prefillOnly && !this.#options.connector.attached) throw noTier(params.requestId);
    if (this.#requests.has(params.requestId))
      throw new KvError('REQUEST', `request ${params.requestId}: that id is in use; choose another`);
    if (this.#scheduler.waiting.count >= limits.maxWaiting) {
      const waiting = `${limits.maxWaiting} requests wait already`;
      throw new KvError('BUSY', `request ${params.requestId}: ${waiting}; try again later`, { retry: true });
    }
    const request = new EngineRequest({
      params,
      arrival: this.#arrivals++,
      maxTotalTokens: Math.min(params.promptTokenIds.length + params.maxTokens, this.maxTotalTokens),
      seed: params.seed ?? (this.#options.randomSeed ?? randomSeed)(),
      stopTokenIds: new Set([...(params.stopTokenIds ?? []), ...(params.ignoreEos ? [] : eosTokenIds)]),
      hasher,
      digester: this.#digester,
      submittedUs: this.#clock.nowUs(),
      onOutput,
    });
    this.#requests.set(params.requestId, request);
    this.#scheduler.add(request);
    this.#options.onLoad?.();
    this.wake();
  }

  /** Takes nothing new from now on; returns how many requests it still has. */
  drain(): number {
    this.#draining = true;
    this.#options.onLoad?.();
    return this.#requests.size;
  }

  get draining(): boolean {
    return this.#draining;
  }

  /** Requests in it. */
  get requestCount(): number {
    return this.#requests.size;
  }

  /** What it has to do at this moment, and how fast it is. */
  load(): EngineLoadFigures {
    const total = this.#kv.blockCount - 1; // without the null block
    const { load, loads } = this.#scheduler;
    return load.figures(total - this.#kv.freeBlockCount, total, loads.blocks);
  }

  /** End a request now: its last output says 'abort'. False when there is no such request (any more). */
  abort(requestId: string): boolean {
    const request = this.#requests.get(requestId);
    if (!request) return false;
    this.#counts.aborted++;
    this.#finish(request, { tokenIds: [], finishReason: 'abort' });
    this.#options.onLoad?.();
    this.wake();
    return true;
  }

  /**
   * Another number of the prompt's first blocks is computed elsewhere; 0: none, take what is there and compute the rest. False:
   * this request waits for none (any more).
   */
  changeHandOff(requestId: string, blocks: number): boolean {
    const request = this.#requests.get(requestId);
    return request !== undefined && this.#scheduler.changeHandOff(request, blocks);
  }

  /** Forget the engine's own cached blocks (not the tiers'). False, and nothing done, while any block is held. */
  resetPrefixCache(): boolean {
    const done = this.#kv.resetPrefixCache();
    this.#handOutEvents();
    return done;
  }

  /**
   * Keep what is cached of these tokens until unpinPrefix, whatever else needs room; returns how many tokens that are.
   * Throws KvError CONFIG (more than maxPinnedBlocks, or a radix tree) or REQUEST (the name is in use).
   */
  pinPrefix(name: string, promptTokenIds: Int32Array | Uint32Array, cacheSalt = ''): number {
    if (!this.#blocks)
      throw new KvError('CONFIG', `pinned prefix ${name}: the radix tree has no pins; use --prefix-cache blocks`);
    const hashes = new CheckedHashes(this.#options.hasher, this.#digester, cacheSalt ? { cacheSalt } : {});
    hashes.append(Uint32Array.from(promptTokenIds));
    const tokenCount = promptTokenIds.length;
    return this.#blocks.pinPrefix(name, { id: name, tokenCount, computedTokens: 0, running: false, hashes });
  }

  /** False when nothing is pinned under this name. */
  unpinPrefix(name: string): boolean {
    const unpinned = this.#blocks?.unpinPrefix(name) ?? false;
    if (unpinned) this.wake();
    return unpinned;
  }

  /** Something outside may let a waiting request go on: the connector's answer to a match. */
  wake(): void {
    this.#woken = true;
    this.#resume?.();
  }

  takeEvents(): KvCacheEvent[] {
    return this.#kv.takeEvents();
  }

  /** All that can be found now, as events, in pages; what was to be handed out before has been. */
  heldEvents(): Iterable<readonly KvCacheEvent[]> {
    this.#handOutEvents();
    return this.#kv.heldEvents();
  }

  stats(): EngineStats {
    const { waiting, running, loads, exports, counts, lookups, handOffs } = this.#scheduler;
    return {
      waiting: waiting.count,
      running: running.count,
      loading: loads.count,
      blockCount: this.#kv.blockCount,
      freeBlocks: this.#kv.freeBlockCount,
      cachedBlocks: this.#kv.cachedBlockCount,
      exportBlocks: exports.heldBlocks,
      exportedBlocks: exports.exportedBlocks,
      skippedExportBlocks: exports.skippedBlocks,
      expiredLoads: loads.expiredCount,
      awaiting: loads.awaitedCount,
      expiredMatches: lookups.expiredCount,
      ...handOffs.counts,
      handOffEnds: { ...handOffs.ends },
      ...counts,
      ...this.#counts,
    };
  }

  /** Every block's place and count agree, and so does the load. O(blocks); for tests. */
  checkIntegrity(): void {
    this.#kv.checkIntegrity();
    this.#scheduler.load.check(this.#requests.values());
  }

  /** Fail what is left with CANCELLED, wait for the step, the loads and the exports in flight (these with a deadline). */
  close(): Promise<void> {
    this.#closed ??= this.#close();
    return this.#closed;
  }

  async #close(): Promise<void> {
    this.#endAll(new KvError('CANCELLED', 'engine: is closing; send the request to another one', { retry: true }));
    await this.#loop;
    const { loads, exports } = this.#scheduler;
    exports.send();
    let late = false;
    const cancel = this.#clock.after(closeDeadlineMs, () => {
      late = true;
      this.wake();
    });
    while (!late && loads.count + exports.heldBlocks > 0) await this.#sleep();
    cancel();
  }

  async #run(): Promise<void> {
    try {
      while (!this.#ended) {
        const batch = this.#scheduler.schedule();
        if (batch.length > 0) {
          await this.#step(batch);
          continue;
        }
        this.#handOutEvents();
        this.#scheduler.exports.send();
        this.#options.onLoad?.();
        await this.#sleep();
      }
      this.#handOutEvents();
    } catch (thrown) {
      // Only a defect of ours comes here, and a GPU that has failed; what else the world does was caught where it happened.
      const error = thrown instanceof Error ? thrown : new Error(String(thrown));
      this.#options.logger?.error({ err: error }, 'engine: stopped');
      this.#ended ??=
        error instanceof KvError
          ? error
          : new KvError('IO', `engine: stopped by a defect: ${error.message}; restart it`, { cause: error });
      // The blocks are in an unknown state: only the callers are told, nothing is freed.
      for (const request of this.#requests.values())
        this.#emit(request, { tokenIds: [], finishReason: '', error: this.#ended });
      this.#requests.clear();
      this.#options.onDefect?.(error);
    }
  }

  #handOutEvents(): void {
    const { onEvents, onPackedEvents } = this.#options;
    if (onPackedEvents) {
      const packed = this.#kv.takePackedEvents();
      if (packed.count > 0) onPackedEvents(packed);
    } else if (onEvents) {
      const events = this.#kv.takeEvents();
      if (events.length > 0) onEvents(events);
    }
  }

  /** Until the next wake, or not at all when one came since the last sleep. */
  async #sleep(): Promise<void> {
    if (!this.#woken) {
      await new Promise<void>((resolve) => {
        this.#resume = resolve;
      });
      this.#resume = undefined;
    }
    this.#woken = false;
  }

  async #step(batch: readonly Share[]): Promise<void> {
    const step = buildStep(batch, this.#kv);
    for (const { request } of batch) request.executing = true;
    this.#counts.steps++;
    const begunUs = this.#clock.nowUs();
    let result: StepResult | KvError;
    try {
      const run = (): Promise<StepResult> => this.#options.executor.execute(step);
      const arrived = batch[0]!.arrived;
      const running = arrived ? arrived.import(run) : run();
      // Beside the step: what these cost, no request waits for.
      this.#scheduler.exports.send();
      this.#handOutEvents();
      result = await running;
    } catch (thrown) {
      if (thrown instanceof InvariantError) throw thrown;
      result = KvError.from(thrown);
    }
    if (result instanceof KvError) {
      if (result.code === 'GPU') throw result; // no later step can succeed in this process
      this.#failed(batch, result);
    } else if (step.import && !result.imported?.every((good) => good === 1)) {
      for (const { request } of batch) this.#scheduler.discarded(request); // computed anew, from where good blocks end
    } else {
      this.#executed(batch, step, result, begunUs);
    }
    this.#options.onLoad?.();
  }

  #failed(batch: readonly Share[], error: KvError): void {
    this.#counts.failedSteps++;
    this.#options.logger?.error({ err: error, sequences: batch.length }, 'engine: a step failed');
    for (const { request } of batch) {
      request.executing = false; // one by one: an output callback may abort another request of this step
      if (request.state === 'finished') this.#scheduler.remove(request);
      else this.#fail(request, error);
    }
  }

  #executed(batch: readonly Share[], step: Step, result: StepResult, begunUs: number): void {
    const elapsedS = (this.#clock.nowUs() - begunUs) / 1e6;
    let prefillTokens = 0;
    let decodeTokens = 0;
    let decodes = 0;
    let positions = 0;
    batch.forEach((share, i) => {
      const { request, count } = share;
      positions += count * request.computedTokens + (count * (count + 1)) / 2;
      if (request.computedTokens < request.promptTokens) prefillTokens += count;
      else {
        decodeTokens += count;
        if (count === 1) decodes++; // more: the answer of one that was preempted, computed anew
      }
      const drawn = samples(share) ? result.tokenIds[i]! : undefined;
      this.#scheduler.computed(request, count);
      if (request.state === 'finished') this.#scheduler.remove(request);
      else if (drawn !== undefined) this.#drawn(request, drawn);
    });
    this.#counts.prefillTokens += prefillTokens;
    this.#counts.decodeTokens += decodeTokens;
    if (decodeTokens === 0 && !step.import)
      this.#options.connector.observePrefill(prefillTokens, positions, result.elapsedUs);
    const tokens = prefillTokens + decodeTokens;
    if (!step.import) this.#scheduler.load.step(tokens - decodes, decodes, elapsedS);
    this.#options.onStep?.({ sequences: batch.length, tokens, elapsedUs: result.elapsedUs });
  }

  #drawn(request: EngineRequest, tokenId: number): void {
    if (tokenId < 0 || tokenId >= this.#options.executor.model.vocabSize) {
      const drew = `the executor drew token ${tokenId}, which is not in the vocabulary`;
      this.#fail(request, new KvError('MODEL', `request ${request.requestId}: ${drew}; check the model's weights`));
      return;
    }
    request.append(tokenId);
    const plain = { tokenIds: [tokenId], finishReason: request.finishReason() };
    const output = request.firstOutputDone ? plain : { ...plain, ...this.#cacheUse(request) };
    if (output !== plain) this.#scheduler.load.settle(request);
    if (output.finishReason === '') {
      this.#emit(request, output);
      return;
    }
    this.#counts.finished++;
    this.#finish(request, output);
  }

  /** All that another worker wanted of this prompt is computed; undefined: the tier that was to take it is gone. */
  #prefilled(request: EngineRequest, readyBlocks: number | undefined): void {
    if (readyBlocks === undefined) {
      this.#fail(request, noTier(request.requestId));
      return;
    }
    this.#counts.finished++;
    this.#counts.prefills++;
    this.#counts.prefilledBlocks += readyBlocks;
    const handOff = { localBlocks: 0, readyBlocks };
    this.#finish(request, { tokenIds: [], finishReason: 'prefilled', ...this.#cacheUse(request), handOff });
  }

  #tell(request: EngineRequest, handOff: HandOffState): void {
    if (request.state !== 'finished') this.#emit(request, { tokenIds: [], finishReason: '', handOff });
  }

  /** With the first token, or the end of a request that has none. */
  #cacheUse(request: EngineRequest): { cache: CacheUse } {
    request.firstOutputDone = true;
    return { cache: cacheUseOf(request, this.#kv.blockTokens, this.#clock.nowUs()) };
  }

  #fail(request: EngineRequest, error: KvError): void {
    this.#counts.failed++;
    this.#finish(request, { tokenIds: [], finishReason: '', error });
  }

  #finish(request: EngineRequest, output: Output): void {
    this.#requests.delete(request.requestId);
    this.#scheduler.remove(request);
    this.#emit(request, output);
  }

  #emit(request: EngineRequest, output: Output): void {
    try {
      request.onOutput(output);
    } catch (error) {
      this.#options.logger?.error({ err: error, requestId: request.requestId }, 'engine: an output callback threw');
      this.abort(request.requestId);
    }
  }

  /** No further step; everybody who is here ends with this error. */
  #endAll(error: KvError): void {
    this.#ended ??= error;
    for (const request of [...this.#requests.values()]) this.#fail(request, error);
    this.wake();
  }
}

const randomSeed = (): bigint => randomBytes(8).readBigUInt64LE();

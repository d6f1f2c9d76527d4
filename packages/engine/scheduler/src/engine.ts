/**
 * The engine: requests in, tokens out. A loop (`EngineLoop`) puts a step together, runs it on the executor's native threads, and
 * hands out what it drew (`Answers`). While a step runs, requests arrive here, are hashed and looked up in the tier, and loads and
 * exports end.
 *
 * Invariant: every submitted request ends with exactly one output that has a finish reason or an error.
 */
import { randomBytes } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import type { ChainHasher } from '@kvtier/identity';
import { type KvCacheEvent, KvCacheManager, type PrefixCache, RadixCache } from '@kvtier/prefix-cache';
import { Answers } from './answers.ts';
import { attentionSpecs, hasWindows, longestSequence, mostBlocks } from './attention-groups.ts';
import { CheckedHashes, contentHasher } from './checked-hashes.ts';
import type { ByTier } from './connector.ts';
import type { EngineLoadFigures } from './engine-load.ts';
import { EngineLoop } from './engine-loop.ts';
import { checkOptions, type EngineOptions } from './engine-options.ts';
import { EngineRequest } from './request.ts';
import { Scheduler } from './scheduler.ts';
import { type Clock, type EngineStats, type GenerateRequest, type OnOutput, systemClock } from './types.ts';
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
  readonly #answers: Answers;
  readonly #loop: EngineLoop;
  /** Until the loop has ended. */
  readonly #running: Promise<void>;
  #arrivals = 0;
  /** Nothing new is taken; what is here goes on. */
  #draining = false;
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
      if (longestSequence(groups, executor, limits.maxStepTokens) > 0) {
        const left = `maxPinnedBlocks ${maxPinnedBlocks} leaves no request room in a pool of ${executor.blockCount} blocks`;
        throw new KvError('CONFIG', `engine: ${left}; lower it or raise kvBytes`);
      }
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
        packedHashBytes: options.onPackedEvents && options.packedHashBytes,
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
      mostBlocks: mostBlocks(groups, blockTokens, limits.maxStepTokens),
      importsByLayer: executor.importsByLayer && !windows,
      wake: () => this.wake(),
      // The scheduler is at work: the caller hears of it when the step has begun.
      onHandOff: (request, localBlocks) =>
        queueMicrotask(() => this.#answers.tell(request, { localBlocks, readyBlocks: 0 })),
      onCame: (request, localBlocks, readyBlocks) => this.#answers.tell(request, { localBlocks, readyBlocks }),
      onReady: (request, readyBlocks) => this.#answers.tell(request, { localBlocks: 0, readyBlocks }),
      onPrefilled: (request, readyBlocks) => this.#answers.prefilled(request, readyBlocks),
    });
    this.#answers = new Answers({
      scheduler: this.#scheduler,
      clock: this.#clock,
      blockTokens,
      onAborted: () => this.#changed(),
      logger: options.logger,
    });
    const parts = { options, clock: this.#clock, kv: this.#kv, scheduler: this.#scheduler, answers: this.#answers };
    this.#loop = new EngineLoop(parts);
    this.#running = this.#loop.run();
  }

  /**
   * Take a request in; its outputs follow, from the loop. Throws KvError: REQUEST (cannot be served as asked), TOO_LONG
   * (could never fit), BUSY (as many wait as may), CANCELLED (the engine drains or is closing), DISCONNECTED (prefillOnly, and
   * there is no tier to give the blocks to).
   */
  submit(params: GenerateRequest, onOutput: OnOutput): void {
    const { executor, hasher, limits, eosTokenIds } = this.#options;
    if (this.#loop.ended) throw this.#loop.ended;
    if (this.#draining)
      throw new KvError('CANCELLED', 'engine: is draining; send the request to another one', { retry: true });
    const { blockTokens } = executor.kv;
    checkRequest(params, { vocabSize: executor.model.vocabSize, maxTotalTokens: this.maxTotalTokens, blockTokens });
    // Here, and not where the first block is full: in the middle of a step it would end every request.
    if (params.cacheSalt) for (const each of [hasher, this.#digester]) each?.extraBytes([params.cacheSalt]);
    if (params.prefillOnly && !this.#options.connector.attached) throw noTier(params.requestId);
    if (this.#answers.get(params.requestId))
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
    this.#answers.add(request);
    this.#scheduler.add(request);
    this.#changed();
  }

  /** Takes nothing new from now on; returns how many requests it still has. */
  drain(): number {
    this.#draining = true;
    this.#options.onLoad?.();
    return this.#answers.count;
  }

  /** It takes nothing new: it was told so, or its loop has ended. */
  get draining(): boolean {
    return this.#draining || this.#loop.ended !== undefined;
  }

  /** Requests in it. */
  get requestCount(): number {
    return this.#answers.count;
  }

  /** What it has to do at this moment, and how fast it is. */
  load(): EngineLoadFigures {
    const total = this.#kv.blockCount - 1; // without the null block
    const { load, incoming } = this.#scheduler;
    return load.figures(total - this.#kv.freeBlockCount, total, incoming.loads.blocks, this.#clock.nowUs());
  }

  /** Blocks that tiers hold were rather computed: to load them would have taken so long. */
  passed(byTier: ByTier, us: number): void {
    this.#scheduler.load.passed(byTier, us / 1e6);
  }

  /** End a request now: its last output says 'abort'. False when there is no such request (any more). */
  abort(requestId: string): boolean {
    return this.#answers.abort(requestId);
  }

  /**
   * Another number of the prompt's first blocks is computed elsewhere; 0: none, take what is there and compute the rest. False:
   * this request waits for none (any more).
   */
  changeHandOff(requestId: string, blocks: number): boolean {
    const request = this.#answers.get(requestId);
    return request !== undefined && this.#scheduler.incoming.changeHandOff(request, blocks);
  }

  /**
   * The first token of a request's answer, as the worker drew it that computes its prompt: it is taken for this request's own, whose
   * first output has it and the next one. False: there is no such request, or it draws its first token itself.
   * Throws KvError REQUEST: there is no such token.
   */
  tellFirstToken(requestId: string, tokenId: number): boolean {
    const { vocabSize } = this.#options.executor.model;
    if (!Number.isInteger(tokenId) || tokenId < 0 || tokenId >= vocabSize) {
      const told = `first token ${tokenId} is not in the vocabulary (0..${vocabSize - 1})`;
      throw new KvError('REQUEST', `request ${requestId}: ${told}`);
    }
    const request = this.#answers.get(requestId);
    if (!request?.takeFirstToken(tokenId)) return false;
    this.#scheduler.load.settle(request);
    return true;
  }

  /**
   * Forget the engine's own cached blocks (not the tiers'). False, and nothing done, while any block is held, or one is on its way to
   * the tier, or was lost there and is soon offered again: what is asked for after a reset is found there.
   */
  resetPrefixCache(): boolean {
    if (this.#options.connector.storingBlocks > 0 || this.#scheduler.exports.pausedOffers > 0) return false;
    const done = this.#kv.resetPrefixCache();
    this.#loop.handOutEvents();
    return done;
  }

  /**
   * Keep what is cached of these tokens until unpinPrefix, whatever else needs room, in place of what this name kept; returns how many
   * tokens that are. Throws KvError CONFIG (more than maxPinnedBlocks, or a radix tree), REQUEST (no prompt of this engine's).
   */
  pinPrefix(name: string, promptTokenIds: Int32Array | Uint32Array, cacheSalt = ''): number {
    if (!this.#blocks)
      throw new KvError(
        'CONFIG',
        `pinned prefix ${name}: the radix tree has no pins; set prefixCache (--prefix-cache) to blocks`,
      );
    const tokenCount = promptTokenIds.length;
    const { vocabSize } = this.#options.executor.model;
    const refuse = (problem: string): never => {
      throw new KvError('REQUEST', `pinned prefix ${name}: ${problem}`);
    };
    if (tokenCount > this.maxTotalTokens)
      refuse(`${tokenCount} tokens; at most ${this.maxTotalTokens} fit into this engine`);
    for (const id of promptTokenIds)
      if (id < 0 || id >= vocabSize) refuse(`token ${id} is not in the vocabulary (0..${vocabSize - 1})`);
    const hashes = new CheckedHashes(this.#options.hasher, this.#digester, cacheSalt ? { cacheSalt } : {});
    hashes.append(Uint32Array.from(promptTokenIds));
    const pinned = this.#blocks.pinPrefix(name, { id: name, tokenCount, computedTokens: 0, running: false, hashes });
    this.wake(); // what the name kept may be free now
    return pinned;
  }

  /** False when nothing is pinned under this name. */
  unpinPrefix(name: string): boolean {
    const unpinned = this.#blocks?.unpinPrefix(name) ?? false;
    if (unpinned) this.wake();
    return unpinned;
  }

  /** Something outside may let a waiting request go on: the connector's answer to a match. */
  wake(): void {
    this.#loop.wake();
  }

  takeEvents(): KvCacheEvent[] {
    return this.#kv.takeEvents();
  }

  /** All that can be found now, as events, in pages; what was to be handed out before has been. */
  heldEvents(): Iterable<readonly KvCacheEvent[]> {
    this.#loop.handOutEvents();
    return this.#kv.heldEvents();
  }

  stats(): EngineStats {
    const { waiting, running, incoming, exports, counts } = this.#scheduler;
    const { loads, lookups, handOffs } = incoming;
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
      ...incoming.counts,
      ...counts,
      ...this.#loop.counts,
      ...this.#answers.counts,
    };
  }

  /** Every block's place and count agree, and so does the load. O(blocks); for tests. */
  checkIntegrity(): void {
    this.#kv.checkIntegrity();
    this.#scheduler.load.check(this.#answers.requests());
  }

  /** Fail what is left with CANCELLED, wait for the step, the loads and the exports in flight (these with a deadline). */
  close(): Promise<void> {
    this.#closed ??= this.#close();
    return this.#closed;
  }

  async #close(): Promise<void> {
    const closing = new KvError('CANCELLED', 'engine: is closing; send the request to another one', { retry: true });
    this.#loop.end(closing);
    this.#answers.failAll(closing);
    await this.#running;
    const { exports, incoming } = this.#scheduler;
    exports.end();
    exports.send();
    let late = false;
    const cancel = this.#clock.after(closeDeadlineMs, () => {
      late = true;
      this.wake();
    });
    while (!late && incoming.loads.count + exports.heldBlocks > 0) await this.#loop.sleep();
    cancel();
  }

  #changed(): void {
    this.#options.onLoad?.();
    this.wake();
  }
}

const randomSeed = (): bigint => randomBytes(8).readBigUInt64LE();

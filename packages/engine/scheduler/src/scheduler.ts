/**
 * Which requests take part in the next step, and with how many tokens. Continuous batching after vLLM V1, without its
 * prefill and decode phases: a request has tokens and computed tokens, and a step brings the second nearer to the first.
 *
 * A step is put together in this order, under one budget of tokens:
 *   1. running requests that decode (one token each), so that a long prompt never stalls an answer;
 *   2. running requests that prefill, oldest first, in chunks;
 *   3. a request whose load lies in the arena, when nobody else is there: its first step imports it;
 *   4. waiting requests, oldest first. One whose tier has not answered yet is passed over, one that does not fit ends the
 *      pass. One whose next blocks are in the tier gets blocks and leaves for `Loads`; so does one whose next blocks another
 *      worker computes (awaited-prompt.ts), with room for its whole prompt.
 * When blocks run out in 1 or 2, the request that arrived last gives up its own and is computed anew later; one that waits for
 * another worker stops waiting then, and gives up its own when nothing is copied to them any more.
 *
 * A request that is prefilled for another worker ends in 'storing': computed, and not all of it is offered and answered yet.
 *
 * Invariants: the oldest request that holds blocks is never preempted for a younger one, so something always advances;
 * blocks become findable only when the step or load that fills them has ended, so a failed one leaves nothing behind.
 */

import { invariant } from '@kvtier/errors';
import type { CacheHit, PrefixCache } from '@kvtier/prefix-cache';
import { ArrivalList } from './arrival-list.ts';
import { AwaitedPrompts } from './awaited-prompts.ts';
import type { Share } from './batch.ts';
import type { ArrivedLoad } from './connector.ts';
import { EngineLoad } from './engine-load.ts';
import { Exports } from './exports.ts';
import { type LoadEnd, Loads } from './loads.ts';
import { Lookups } from './lookups.ts';
import type { EngineRequest } from './request.ts';
import type { SchedulerOptions } from './scheduler-options.ts';
import { Storing } from './storing.ts';

/** What became of a waiting request: 'later' passes it over, 'full' ends the pass. */
type Admission = 'admitted' | 'loading' | 'later' | 'full';

/** Of a request that runs: blocks become findable when their step has computed them. */
const asItGoes = { delayCacheBlocks: true } as const;

export class Scheduler {
  readonly waiting = new ArrivalList();
  readonly running = new ArrivalList();
  readonly loads: Loads;
  readonly exports: Exports;
  readonly load: EngineLoad;
  readonly counts = {
    preemptions: 0,
    promptTokens: 0,
    hitTokens: 0,
    loadedTokens: 0,
    loads: 0,
    shortLoads: 0,
    layeredLoads: 0,
  };
  readonly lookups: Lookups;
  readonly handOffs: AwaitedPrompts;
  readonly #options: SchedulerOptions;
  readonly #kv: PrefixCache;
  /** Some layers see only a window. */
  readonly #windows: boolean;
  /** The step that is being put together. */
  #batch: Share[] = [];
  #budget = 0;
  readonly #storing: Storing;

  constructor(options: SchedulerOptions) {
    const { kv, connector, clock, wake } = options;
    this.#options = options;
    this.#kv = kv;
    this.#windows = options.windows ?? false;
    this.load = new EngineLoad(kv.blockTokens);
    const { maxExportBlocks, exportGatherBlocks, ahead } = options;
    this.exports = new Exports(kv, connector, maxExportBlocks, exportGatherBlocks, wake, ahead, (...held) =>
      this.#storing.settled(...held),
    );
    const { onReady, onPrefilled } = options;
    const release = (request: EngineRequest): void => this.#release(request);
    this.#storing = new Storing({ connector, exports: this.exports, clock, release, wake, onReady, onPrefilled });
    this.lookups = new Lookups({ connector, clock, deadlineMs: options.matchDeadlineMs, wake });
    this.handOffs = new AwaitedPrompts(clock, kv.blockTokens, options.onHandOff);
    this.loads = new Loads({
      kv,
      connector,
      clock,
      deadlineMs: options.loadDeadlineMs,
      onEnd: (request, end) => this.#loadEnded(request, end),
      onArrived: options.importsByLayer ? () => this.#arrived() : undefined,
      onFreed: wake,
    });
  }

  /** A new request: its lookup in the tier begins at once, while the current step runs. */
  add(request: EngineRequest): void {
    this.waiting.add(request);
    this.#expect(request, 0);
    if (this.waiting.count > this.#options.maxSequences) return;
    const computed = this.#kv.getComputedBlocks(request);
    this.#expect(request, computed.tokens);
    if (request.handOff) return; // the tier is asked when there is room
    this.#blocksToLoad(request, computed);
    const hasToWait = this.waiting.count > 1 || this.running.count >= this.#options.maxSequences;
    if (hasToWait && request.mayLoad && request.hashes.blockCount > 0)
      this.#options.connector.prefetch(request.id, request.hashes.packed, computed.tokens / this.#kv.blockTokens);
  }

  /**
   * A request has ended: out of every list, its blocks free as soon as nothing writes them any more. Call again when
   * the step that it was `executing` in is over.
   */
  remove(request: EngineRequest): void {
    const { state } = request;
    request.state = 'finished';
    this.handOffs.abandon(request);
    this.#storing.delete(request);
    this.load.settle(request);
    if (state === 'waiting') this.waiting.remove(request);
    if (state === 'running') this.running.remove(request);
    if (state !== 'finished') this.#options.connector.forget(request.id);
    request.cancelMatchDeadline?.();
    if (state === 'loading') this.loads.abandon(request);
    else if (!request.executing && request.holdsBlocks) {
      const before = this.#kv.freeBlockCount;
      this.#release(request);
      this.load.freed(this.#kv.freeBlockCount - before);
    }
  }

  /** The next step; empty when nothing can be computed now. */
  schedule(): Share[] {
    this.#storing.goOn();
    this.#batch = [];
    this.#budget = this.#options.maxStepTokens;
    const decodes = (request: EngineRequest): boolean => request.tokenCount - request.computedTokens === 1;
    const running = this.running.toArray();
    for (const request of running) if (decodes(request)) this.#continue(request);
    for (const request of running) if (!decodes(request)) this.#continue(request);
    const arrived = this.#admitArrived();
    this.#admitWaiting();
    this.exports.goDown();
    return arrived ? this.#batch.map((share) => ({ ...share, arrived })) : this.#batch;
  }

  /** The step is over for this request: `count` more tokens are computed. Full blocks are findable, and offered. */
  computed(request: EngineRequest, count: number): void {
    request.executing = false;
    request.computedTokens += count;
    this.load.settle(request);
    this.#kv.cacheBlocks(request, request.computedTokens);
    if (request.state !== 'running') return;
    if (request.prefillOnly && request.computedTokens >= request.tokenCount) {
      this.running.remove(request);
      request.state = 'storing';
      this.load.settle(request);
      this.#storing.add(request);
    }
    this.exports.offer(request);
  }

  /** What the step computed for this request lay over blocks that did not arrive: none of it counts. */
  discarded(request: EngineRequest): void {
    request.executing = false;
    if (request.state === 'finished') this.remove(request);
  }

  /** Another number of the prompt's first blocks is computed elsewhere. False: nothing waits for them any more. */
  changeHandOff(request: EngineRequest, blocks: number): boolean {
    const { handOff } = request;
    if (!handOff?.change(blocks)) return false;
    if (handOff.state !== 'awaiting') return true;
    this.#expect(request, Math.max(request.computedTokens, blocks * this.#kv.blockTokens));
    this.loads.awaitOnly(request, blocks);
    return true;
  }

  #continue(request: EngineRequest): void {
    const count = Math.min(request.tokenCount - request.computedTokens, this.#budget);
    if (!request.running || count === 0) return; // preempted a moment ago, or nothing left of the budget
    while (!this.#kv.allocateSlots(request, count, asItGoes)) {
      if (this.#storing.giveRoom()) continue;
      const victim = this.#latestHolder();
      invariant(victim, () => `request ${request.id}: runs and holds no blocks`);
      if (this.#revokeYounger(victim)) return; // its blocks come back soon
      // Exports hold blocks that its window has left: they come back without anybody starting anew.
      if (victim === request && this.#windows && this.exports.heldBlocks > 0) return;
      this.#preempt(victim);
      if (victim === request) return;
    }
    this.#take(request, count);
  }

  #admitWaiting(): void {
    for (const request of this.waiting.toArray()) {
      if (this.#budget === 0 || this.running.count >= this.#options.maxSequences) return;
      let admission = this.#admit(request);
      if (admission === 'full' && this.#storing.giveRoom()) admission = this.#admit(request);
      while (admission === 'full' && this.running.count === 0) {
        // Nothing runs, so nobody will free a block: take those of requests that have loaded and wait behind this one.
        const victim = this.#latestHolder(request);
        if (this.#revokeYounger(victim && victim.arrival > request.arrival ? victim : request)) break;
        if (!victim) break;
        this.#preempt(victim);
        admission = this.#admit(request);
      }
      if (admission !== 'full') continue;
      const othersHold = this.running.count + this.loads.count + this.exports.heldBlocks + this.#storing.count > 0;
      invariant(othersHold, () => `request ${request.id}: does not fit into an empty pool`);
      return;
    }
  }

  #admit(request: EngineRequest): Admission {
    const kv = this.#kv;
    let computed: CacheHit | undefined;
    if (!request.holdsBlocks) {
      computed = kv.getComputedBlocks(request);
      this.#expect(request, computed.tokens);
      const toAwait = this.#blocksToAwait(request, computed);
      if (toAwait > 0) return this.#await(request, computed, toAwait);
      const toLoad = this.#blocksToLoad(request, computed);
      if (toLoad === 'pending') return 'later';
      if (toLoad > 0) return this.#load(request, computed, toLoad);
    }
    const hitTokens = computed?.tokens ?? 0;
    const count = Math.min(request.tokenCount - request.computedTokens - hitTokens, this.#budget);
    const admitted = kv.allocateSlots(request, count, {
      ...(computed ? { computed } : {}),
      delayCacheBlocks: true,
      fullSequenceMustFit: true,
    });
    if (!admitted) return 'full';
    if (computed) {
      this.#skipHandOff(request, computed);
      this.#hit(request, computed);
    }
    this.waiting.remove(request);
    this.#begin(request, count);
    return 'admitted';
  }

  #begin(request: EngineRequest, count: number): void {
    this.running.add(request);
    request.state = 'running';
    this.load.settle(request);
    if (request.startedUs === undefined) {
      request.startedUs = this.#options.clock.nowUs();
      this.counts.promptTokens += request.promptTokens;
    }
    this.#take(request, count);
  }

  /**
   * With the step or beside the steps? With it, the wait for a load is the wait for its first layer. But all that is in that step
   * waits for all layers; and while others compute, a copy beside them costs nothing. So: with the step where nobody else is.
   */
  #isAlone(): boolean {
    return this.running.count === 0 && this.waiting.count === 0 && this.loads.count === 1;
  }

  #arrived(): boolean {
    if (!this.#isAlone()) return false;
    this.#options.wake();
    return true;
  }

  /** The load that the step brings in; all others are copied. */
  #admitArrived(): ArrivedLoad | undefined {
    for (const { request, endBlock, load } of this.loads.arrivals()) {
      const computedTokens = endBlock * this.#kv.blockTokens;
      if (load.live && this.#isAlone() && computedTokens < request.tokenCount) {
        const before = request.computedTokens;
        request.computedTokens = computedTokens;
        const count = Math.min(request.tokenCount - computedTokens, this.#budget);
        if (this.#kv.allocateSlots(request, count, { delayCacheBlocks: true, fullSequenceMustFit: true })) {
          this.loads.takeArrived(request);
          request.loadUs += this.#options.clock.nowUs();
          this.counts.layeredLoads++;
          this.#begin(request, count);
          return load;
        }
        request.computedTokens = before;
      }
      this.loads.decline(request);
    }
    return undefined;
  }

  /** Blocks beyond the local hit that should come from the tier. */
  #blocksToLoad(request: EngineRequest, hit: CacheHit): number | 'pending' {
    return this.lookups.blocksToLoad(request, hit.tokens / this.#kv.blockTokens, this.#mostLoaded(request));
  }

  /** Blocks of the chain that may come from elsewhere. */
  #mostLoaded(request: EngineRequest): number {
    // The last token is computed in any case; with a window it may look at a block that a longer prefix passes over.
    // A step imports no block that it writes to.
    const wholeBlocks = this.#windows || this.#options.importsByLayer;
    return wholeBlocks ? Math.floor((request.tokenCount - 1) / this.#kv.blockTokens) : request.hashes.blockCount;
  }

  #load(request: EngineRequest, computed: CacheHit, blocks: number): Admission {
    if (this.loads.count - this.loads.awaitedCount >= this.#options.maxSequences) return 'later';
    if (!this.#makeRoom(request, computed, blocks, 0)) return 'full';
    this.#skipHandOff(request, computed);
    this.#leave(request, computed, blocks);
    request.loadUs -= this.#options.clock.nowUs(); // until the end is added
    this.counts.loads++;
    this.loads.start(request, computed.tokens / this.#kv.blockTokens, blocks);
    return 'loading';
  }

  /** Room for the hit, for `blocks` blocks behind it that are to come, and for `newTokens` behind these. False: there is none. */
  #makeRoom(request: EngineRequest, computed: CacheHit, blocks: number, newTokens: number): boolean {
    const externalTokens = blocks * this.#kv.blockTokens;
    const admitted = this.#kv.allocateSlots(request, newTokens, {
      computed,
      externalComputedTokens: externalTokens,
      delayCacheBlocks: true,
      fullSequenceMustFit: true,
      reservedBlocks: this.#promisedBlocks(),
    });
    return admitted !== null;
  }

  /** Out of the queue, until the blocks have come. */
  #leave(request: EngineRequest, computed: CacheHit, blocks: number): void {
    this.#hit(request, computed);
    this.waiting.remove(request);
    request.state = 'loading';
    this.#expect(request, computed.tokens + blocks * this.#kv.blockTokens);
  }

  /** Blocks beyond the local hit that another worker computes, where that can be waited for. */
  #blocksToAwait(request: EngineRequest, hit: CacheHit): number {
    const { handOff } = request;
    if (handOff?.state !== 'open' || !this.#options.connector.attached) return 0;
    const end = Math.min(handOff.blocks, this.#mostLoaded(request));
    return Math.max(0, end - hit.tokens / this.#kv.blockTokens);
  }

  #await(request: EngineRequest, computed: CacheHit, blocks: number): Admission {
    if (this.loads.awaitedCount >= this.#options.maxSequences) return 'later';
    const localBlocks = computed.tokens / this.#kv.blockTokens;
    // Where windows bound what a sequence holds, the rest of the prompt is not laid out at once.
    const rest = this.#windows ? 0 : request.tokenCount - (localBlocks + blocks) * this.#kv.blockTokens;
    if (!this.#makeRoom(request, computed, blocks, Math.max(0, rest))) return 'full';
    this.handOffs.begin(request, localBlocks);
    this.#leave(request, computed, blocks);
    this.loads.start(request, localBlocks, blocks, request.handOff);
    return 'loading';
  }

  #skipHandOff(request: EngineRequest, computed: CacheHit): void {
    this.handOffs.skip(request, computed.tokens / this.#kv.blockTokens, this.#mostLoaded(request));
  }

  /** Who waits for another worker and arrived after this one gives up its room. False: nobody. */
  #revokeYounger(than: EngineRequest): boolean {
    const youngest = this.loads.latestAwaiting();
    if (!youngest || youngest.arrival <= than.arrival) return false;
    if (youngest.handOff!.isRevoked) return true;
    youngest.handOff!.isRevoked = true;
    this.loads.awaitOnly(youngest, 0);
    return true;
  }

  /** A load is over; the request goes on where its good blocks end. */
  #loadEnded(request: EngineRequest, end: LoadEnd | undefined): void {
    if (request.state === 'finished') {
      // While a step imported, which counted on all of it: its blocks go when that has ended, and are worth what arrived.
      request.computedTokens = end ? (end.firstBlock + end.loaded) * this.#kv.blockTokens : 0;
      return;
    }
    const withStep = request.state === 'running';
    const wasAwaited = request.handOff?.state === 'awaiting';
    if (!withStep) {
      if (!wasAwaited) request.loadUs += this.#options.clock.nowUs();
      request.state = 'waiting';
    }
    const lost = end !== undefined && this.#isLost(request, end);
    if (wasAwaited) this.handOffs.loaded(request, end, lost);
    if (lost) {
      this.#kv.free(request.id);
      request.lostLoads++;
    }
    if (end && !lost) {
      const { blockTokens } = this.#kv;
      // At least the last token is computed, for its logits.
      request.computedTokens = Math.min((end.firstBlock + end.loaded) * blockTokens, request.tokenCount - 1);
      // Who computes for another worker asks about these, too: they are to lie in this node.
      if (end.firstBlock === 0 && !request.prefillOnly) request.offeredBlocks = end.loaded;
      this.#kv.cacheBlocks(request, request.computedTokens);
      if (end.first) request.loadedByTier = end.byTier;
      this.counts.loadedTokens += end.loaded * blockTokens;
    } else {
      request.computedTokens = 0;
      request.offeredBlocks = 0;
      request.engineHitTokens = 0;
      request.holdsBlocks = false;
    }
    if (!end || end.loaded < end.wanted) {
      // A table that was laid out for a longer prefix says nothing against a shorter one: that is tried, once.
      request.mayLoad = lost && request.lostLoads === 1;
      if (!wasAwaited) this.counts.shortLoads++;
    }
    // How long another worker took says nothing of the tier.
    if (end && !wasAwaited) this.load.loaded(end.byTier, end.elapsedUs / 1e6);
    this.#expect(request, 0);
    if (withStep) return; // it goes on in the next step
    this.waiting.add(request);
    this.#options.wake();
  }

  /** What came is no prefix in all groups: the window of a shorter one is not in the table. Only with windows. */
  #isLost(request: EngineRequest, end: LoadEnd): boolean {
    if (end.loaded === end.wanted) return false;
    return !this.#kv.covers(request.id, (end.firstBlock + end.loaded) * this.#kv.blockTokens);
  }

  /** The hit is the request's now. */
  #hit(request: EngineRequest, hit: CacheHit): void {
    const first = request.startedUs === undefined;
    request.holdsBlocks = true;
    request.computedTokens = hit.tokens;
    request.offeredBlocks = 0; // hits are offered again: the tier may have lost them, and what it holds it touches
    if (first) {
      request.engineHitTokens = hit.tokens;
      request.loadedByTier = {};
    }
    this.counts.hitTokens += hit.tokens;
    this.#kv.recordLookup(request.tokenCount, hit.tokens, !first);
  }

  /** So many of its tokens will not have to be computed. */
  #expect(request: EngineRequest, tokens: number): void {
    const { handOff } = request;
    const elsewhere = handOff?.state === 'open' ? handOff.blocks * this.#kv.blockTokens : 0;
    request.expectedTokens = Math.max(tokens, elsewhere);
    this.load.settle(request);
  }

  #take(request: EngineRequest, count: number): void {
    this.#batch.push({ request, count, arrived: undefined });
    this.#budget -= count;
  }

  /** Who arrived last of those that hold blocks and can give them up at once, other than `except`. */
  #latestHolder(except?: EngineRequest): EngineRequest | undefined {
    let latest: EngineRequest | undefined;
    const consider = (request: EngineRequest): void => {
      if (request.holdsBlocks && request !== except && request.arrival > (latest?.arrival ?? -1)) latest = request;
    };
    for (const request of this.running) consider(request);
    for (const request of this.waiting) consider(request);
    return latest;
  }

  /** Back to the queue, at its old place, with nothing computed; its blocks can be hit again until they are reused. */
  #preempt(request: EngineRequest): void {
    const place = this.#batch.findIndex((share) => share.request === request);
    if (place >= 0) this.#budget += this.#batch.splice(place, 1)[0]!.count;
    this.#release(request);
    this.counts.preemptions++;
    if (request.state === 'running') {
      request.state = 'waiting';
      this.running.remove(request);
      this.waiting.add(request);
    }
    this.#expect(request, 0);
  }

  #release(request: EngineRequest): void {
    this.exports.giveUp(request);
    this.#kv.free(request.id);
    request.holdsBlocks = false;
    request.computedTokens = 0;
    request.offeredBlocks = 0;
  }

  /** Blocks that requests which hold some already still need to finish their prefill. */
  #promisedBlocks(): number {
    let blocks = 0;
    const promise = (request: EngineRequest): void => {
      if (request.holdsBlocks) blocks += this.#kv.blocksToFinish(request);
    };
    for (const request of this.running) promise(request);
    for (const request of this.waiting) promise(request);
    for (const request of this.loads.requests()) promise(request);
    return blocks;
  }
}

/**
 * Which requests take part in the next step, and with how many tokens. Continuous batching after vLLM V1, without its
 * prefill and decode phases: a request has tokens and computed tokens, and a step brings the second nearer to the first.
 *
 * A step is put together in this order, under one budget of tokens:
 *   1. running requests that decode (one token each), so that a long prompt never stalls an answer; what they want between two
 *      tokens bounds the budget of all that follows (pacing.ts);
 *   2. what is left of prompts that another worker has computed, at most a block: it came as far without waiting for anybody here;
 *   3. running requests that prefill, oldest first, in chunks;
 *   4. a request whose load lies in the arena, when nobody else is there: its first step imports it;
 *   5. waiting requests, oldest first. One whose tier has not answered yet is passed over, and keeps what room it needs; one that does
 *      not fit ends the pass. One whose next blocks are in the tier gets blocks and leaves for `Loads`.
 * One that is alone, and whose next blocks come about as fast as they are computed, computes the first of them while the others are
 * loaded (head.ts), and passes over these.
 * One whose next blocks another worker computes (awaited-prompt.ts) leaves with room for its whole prompt as soon as there is some, and
 * is in no step until they have come.
 * When blocks run out in 1 or 3, the request that arrived last gives up its own and is computed anew later; one that waits for
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
import type { Share } from './batch.ts';
import type { ArrivedLoad } from './connector.ts';
import { EngineLoad } from './engine-load.ts';
import { Exports } from './exports.ts';
import { Incoming } from './incoming.ts';
import { Looks } from './looks.ts';
import { Pace } from './pacing.ts';
import type { EngineRequest } from './request.ts';
import { Room } from './room.ts';
import type { SchedulerOptions } from './scheduler-options.ts';
import { Storing } from './storing.ts';

/**
 * What became of a waiting request: 'later' passes it over, and so does 'pending', where the room that it needs gathers for it meanwhile;
 * 'full' ends the pass.
 */
type Admission = 'admitted' | 'loading' | 'later' | 'pending' | 'full';

/** Hand-offs of what lies here that a step looks up again. */
const localAgain = 16;

/** Of a request that runs: blocks become findable when their step has computed them. */
const asItGoes = { delayCacheBlocks: true } as const;

export class Scheduler {
  readonly waiting = new ArrivalList();
  readonly running = new ArrivalList();
  readonly incoming: Incoming;
  readonly exports: Exports;
  readonly load: EngineLoad;
  readonly counts = { preemptions: 0, begunAnew: 0, layeredLoads: 0 };
  readonly #options: SchedulerOptions;
  readonly #kv: PrefixCache;
  /** Some layers see only a window. */
  readonly #windows: boolean;
  /** The step that is being put together. */
  #batch: Share[] = [];
  #budget = 0;
  readonly #pace = new Pace();
  readonly #looks = new Looks();
  readonly #storing: Storing;
  readonly #room: Room;
  /** Blocks of the one that was last found pending, or full beside what is kept, which nobody holds yet. */
  #lacking = 0;

  constructor(options: SchedulerOptions) {
    const { kv, connector, clock, wake } = options;
    this.#options = options;
    this.#kv = kv;
    this.#windows = options.windows ?? false;
    this.load = new EngineLoad(kv.blockTokens, options.mostBlocks, options.maxStepTokens);
    const { maxExportBlocks, exportGatherBlocks, ahead } = options;
    this.exports = new Exports(kv, connector, clock, maxExportBlocks, exportGatherBlocks, wake, ahead, (...held) =>
      this.#storing.settled(...held),
    );
    const { onReady, onPrefilled } = options;
    const release = (request: EngineRequest): void => this.#room.release(request);
    this.#storing = new Storing({ connector, exports: this.exports, clock, release, wake, onReady, onPrefilled });
    const { waiting, running, exports, load } = this;
    this.#room = new Room({ kv, waiting, running, exports, loads: () => this.incoming.loads });
    const onArrived = (): boolean => this.#arrived();
    this.incoming = new Incoming({ options, waiting, running, room: this.#room, load, onArrived });
  }

  /** A new request: its lookup in the tier begins at once, while the current step runs. */
  add(request: EngineRequest): void {
    this.waiting.add(request);
    this.incoming.expect(request, 0);
    if (request.handOff) this.incoming.departHandOffs(0); // nothing has changed but for this one
    if (request.state !== 'waiting' || this.waiting.count > this.#options.maxSequences) return;
    this.incoming.ask(request, this.waiting.count > 1 || this.running.count >= this.#options.maxSequences);
  }

  /**
   * A request has ended: out of every list, its blocks free as soon as nothing writes them any more. Call again when
   * the step that it was `executing` in is over.
   */
  remove(request: EngineRequest): void {
    const { state } = request;
    request.state = 'finished';
    this.incoming.handOffs.abandon(request);
    this.#storing.delete(request);
    this.load.settle(request);
    if (state === 'waiting') this.waiting.remove(request);
    if (state === 'running') this.running.remove(request);
    if (state !== 'finished') this.#options.connector.forget(request.id);
    request.cancelMatchDeadline?.();
    if (state === 'loading') this.incoming.loads.abandon(request);
    else if (request.executing || !request.holdsBlocks) return;
    else if (request.head?.isLoading) this.incoming.leaveLoad(request);
    else {
      const before = this.#kv.freeBlockCount;
      this.#room.release(request);
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
    this.#budget = Math.min(this.#budget, this.#pace.promptTokens(this.#batch, this.load, this.#kv.blockTokens));
    if (this.waiting.handOffs > 0) {
      this.incoming.departHandOffs(localAgain);
      this.#admitTails();
    }
    for (const request of running) if (!decodes(request)) this.#continue(request);
    const arrived = this.#admitArrived();
    this.#admitWaiting();
    this.exports.goDown();
    return arrived ? this.#batch.map((share) => ({ ...share, arrived })) : this.#batch;
  }

  /** The step is over: prompt tokens computed, requests that decoded, seconds; see `EngineLoad.step`. */
  stepped(prefillTokens: number, decodes: number, seconds: number, mostLeft: number): void {
    this.load.step(prefillTokens, decodes, seconds, mostLeft);
    this.#pace.ended(prefillTokens, seconds);
    this.load.paced(this.#pace.trust);
  }

  /** The step is over for this request: `count` more tokens are computed. Full blocks are findable, and offered. */
  computed(request: EngineRequest, count: number): void {
    request.executing = false;
    request.computedTokens += count;
    this.load.settle(request);
    if (request.suspects) return;
    this.#kv.cacheBlocks(request, request.computedTokens);
    if (request.state !== 'running') return;
    if (request.head?.isOverdue && request.head.isLoading) {
      this.incoming.loads.giveUp(request);
      return;
    }
    if (this.incoming.headEnds(request)) {
      // What is loaded is the tier's already: the head is offered by itself, before that is passed over.
      this.exports.offer(request, true);
      this.incoming.passOver(request);
    }
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

  /** It draws a token in the step that is over: where it began anew, its hit was at fault, and nobody is to find that again. */
  proved(request: EngineRequest): void {
    const { suspects } = request;
    if (!suspects) return;
    request.suspects = undefined;
    this.#kv.forget(request, suspects);
  }

  /**
   * What the step computed for this request is no number: not kept, and what it has not offered of its earlier steps never is. True: blocks
   * that were there already may be at fault, and would fail whoever hits them, for as long as they are hit. So it computes all of its tokens
   * itself, and shows by that whose fault it is.
   */
  spoiled(request: EngineRequest): boolean {
    request.computedTokens = Math.min(request.computedTokens, request.offeredBlocks * this.#kv.blockTokens);
    this.discarded(request);
    if (request.state !== 'running' || request.head || !request.hasHit || request.skipReadingPrefixCache) return false;
    request.skipReadingPrefixCache = true;
    request.suspects = this.#kv.blockTables(request.id).map((table) => [...table]);
    request.mayLoad = false;
    request.engineHitTokens = 0;
    request.loadedByTier = {};
    request.loadedTokens = 0;
    this.counts.begunAnew++;
    this.#beginAnew(request); // its step is over, and the batch of it is being gone through
    return true;
  }

  /** Where another worker waits for its blocks, the step is no longer than it asked for, so that they come while the next are computed. */
  #shorten({ prefillOnly, tokenCount, computedTokens }: EngineRequest): void {
    if (!prefillOnly) return;
    const { blockTokens } = this.#kv;
    const most = prefillOnly.stepBlocks * blockTokens;
    // What lies behind the blocks, of one that draws: no step of its own.
    const tail = tokenCount - prefillOnly.blocks * blockTokens;
    const isLast = tokenCount - computedTokens <= most + tail;
    this.#budget = Math.min(this.#budget, isLast ? most + tail : most);
  }

  #continue(request: EngineRequest): void {
    this.#shorten(request);
    const count = Math.min(request.openTokens - request.computedTokens, this.#budget);
    // Preempted a moment ago, or nothing left of the budget, or its head is computed and the rest not loaded yet.
    if (!request.running || count === 0) return;
    while (!this.#kv.allocateSlots(request, count, asItGoes)) {
      if (this.#storing.giveRoom()) continue;
      const victim = this.#room.latestHolder();
      invariant(victim, () => `request ${request.id}: runs and holds no blocks`);
      if (this.#room.revokeYounger(victim)) return; // its blocks come back soon
      if (victim === request && this.#roomComesBack()) return;
      this.#preempt(victim);
      if (victim === request) return;
    }
    this.#take(request, count);
  }

  /**
   * Blocks come back without anybody starting anew: of prompts that are about to be stored, of exports, of loads. With windows whoever
   * starts anew is let in at once, and would compute the same chunk again and again.
   */
  #roomComesBack(): boolean {
    const { loads } = this.incoming;
    return this.#storing.holdsRoom || (this.#windows && (this.exports.heldBlocks > 0 || loads.count > 0));
  }

  #admitWaiting(): void {
    if (this.#budget === 0) return;
    this.#looks.begin();
    this.#looks.end(this.#walkQueue());
  }

  /** One pass over the queue: who it ends at, before it has seen all of it. */
  #walkQueue(): EngineRequest | undefined {
    const { waiting, incoming } = this;
    /** Of those that were passed over. */
    let before = 0;
    /**
     * Of these, those that cannot say yet whether they fit: else who comes later would take, at each question, the room that had gathered
     * for them. While nothing is computed nobody is kept: an executor that has nothing to do waits for no answer.
     */
    let gathering = 0;
    let hasFound = false;
    for (let request = waiting.after(); request; request = waiting.after(request)) {
      if (this.#budget === 0 || this.running.count >= this.#options.maxSequences) return request;
      const isKnown = incoming.isFullFor(request);
      const kept = this.#batch.length > 0 ? gathering : 0;
      let admission = !isKnown || this.#looks.again(request) ? this.#admit(request, before, kept) : 'later';
      // Who holds blocks has left others theirs: it needs what the rest of its prompt takes.
      if (admission === 'full' && kept > 0 && !request.holdsBlocks) admission = 'pending';
      if (admission === 'full' && this.#storing.giveRoom()) admission = this.#admit(request, before, 0);
      while (admission === 'full' && this.running.count === 0) {
        // Nothing runs, so nobody will free a block: take those of requests that have loaded and wait behind this one.
        const victim = this.#room.latestHolder(request);
        // Its blocks come back: now or later, and who had them is in the queue then.
        if (this.#room.revokeYounger(victim && victim.arrival > request.arrival ? victim : request)) return request;
        if (!victim) break;
        this.#preempt(victim);
        admission = this.#admit(request, before, 0);
      }
      if (admission === 'later' || admission === 'pending') {
        before += request.counted.blocks;
        if (admission === 'pending') gathering += this.#lacking;
        if (isKnown) continue;
        hasFound ||= incoming.isFullFor(request);
        if (this.#looks.goOn()) continue;
        // These are passed over at once next time: in a turn of its own, so that others get theirs.
        if (hasFound) this.#options.clock.after(0, this.#options.wake);
        return request;
      }
      if (admission !== 'full') continue;
      const othersHold =
        this.running.count + this.incoming.loads.count + this.exports.heldBlocks + this.#storing.count > 0;
      invariant(othersHold, () => `request ${request.id}: does not fit into an empty pool`);
      return request;
    }
    return undefined;
  }

  #admitTails(): void {
    const { waiting } = this;
    for (let request = waiting.after(); request; request = waiting.after(request)) {
      if (this.#budget === 0 || this.running.count >= this.#options.maxSequences) return;
      // The answer's first token, where it is known already, is none of the prompt's.
      const isTail = request.promptTokens - request.computedTokens <= this.#kv.blockTokens;
      if (isTail && request.handOff?.state === 'over' && request.holdsBlocks) this.#admit(request, 0, 0);
    }
  }

  /** `reserved`: blocks that those before it wait for; `kept`: of these, those that it leaves them whatever comes for it. */
  #admit(request: EngineRequest, reserved: number, kept: number): Admission {
    const kv = this.#kv;
    let computed: CacheHit | undefined;
    if (!request.holdsBlocks) {
      computed = kv.getComputedBlocks(request);
      this.incoming.expect(request, computed.tokens);
      const departure = this.incoming.depart(request, computed, reserved, kept);
      if (departure === 'head') {
        this.#begin(request, Math.min(request.openTokens - request.computedTokens, this.#budget));
        return 'admitted';
      }
      if (departure === 'pending' || (departure === 'full' && kept > 0))
        this.#lacking = this.#lackingOf(request, computed);
      if (departure !== undefined) return departure;
    }
    this.#shorten(request);
    const hitTokens = computed?.tokens ?? 0;
    const count = Math.min(request.tokenCount - request.computedTokens - hitTokens, this.#budget);
    const admitted = kv.allocateSlots(request, count, {
      ...(computed ? { computed } : {}),
      delayCacheBlocks: true,
      fullSequenceMustFit: true,
      reservedBlocks: computed ? this.incoming.keep(request, hitTokens + count, kept) : 0, // else it has its room
    });
    if (!admitted) {
      if (kept > 0) this.#lacking = this.#lackingOf(request, computed); // else it ends the pass
      return 'full';
    }
    if (computed) this.incoming.hit(request, computed);
    this.waiting.remove(request);
    this.#begin(request, count);
    return 'admitted';
  }

  #lackingOf(request: EngineRequest, computed: CacheHit | undefined): number {
    return computed ? Math.max(0, request.counted.blocks - this.#kv.heldBlocks(computed)) : 0;
  }

  #begin(request: EngineRequest, count: number): void {
    this.running.add(request);
    request.state = 'running';
    this.load.settle(request);
    if (request.startedUs === undefined) {
      request.startedUs = this.#options.clock.nowUs();
      this.incoming.begun(request);
    }
    this.#take(request, count);
  }

  /**
   * With the step or beside the steps? With it, the wait for a load is the wait for its first layer. But all that is in that step
   * waits for all layers; and while others compute, a copy beside them costs nothing. So: with the step where nobody else is.
   */
  #isAlone(): boolean {
    return this.running.count === 0 && this.waiting.count === 0 && this.incoming.loads.count === 1;
  }

  #arrived(): boolean {
    if (!this.#isAlone()) return false;
    this.#options.wake();
    return true;
  }

  /** The load that the step brings in; all others are copied. */
  #admitArrived(): ArrivedLoad | undefined {
    for (const { request, endBlock, load } of this.incoming.loads.arrivals()) {
      const computedTokens = endBlock * this.#kv.blockTokens;
      if (load.live && this.#isAlone() && computedTokens < request.tokenCount) {
        const before = request.computedTokens;
        request.computedTokens = computedTokens;
        const count = Math.min(request.tokenCount - computedTokens, this.#budget);
        if (this.#kv.allocateSlots(request, count, { delayCacheBlocks: true, fullSequenceMustFit: true })) {
          this.incoming.loads.takeArrived(request);
          request.loadUs += this.#options.clock.nowUs();
          this.counts.layeredLoads++;
          this.#begin(request, count);
          return load;
        }
        request.computedTokens = before;
      }
      this.incoming.loads.decline(request);
    }
    return undefined;
  }

  #take(request: EngineRequest, count: number): void {
    this.#batch.push({ request, count, arrived: undefined });
    this.#budget -= count;
  }

  /** Back to the queue, at its old place, with nothing computed; its blocks can be hit again until they are reused. */
  #preempt(request: EngineRequest): void {
    invariant(!request.head, () => `request ${request.id}: preempted while a hit comes from both ends`);
    const place = this.#batch.findIndex((share) => share.request === request);
    if (place >= 0) this.#budget += this.#batch.splice(place, 1)[0]!.count;
    this.counts.preemptions++;
    this.#beginAnew(request);
  }

  /** Without what it holds. */
  #beginAnew(request: EngineRequest): void {
    this.#room.release(request);
    if (request.state === 'running') {
      request.state = 'waiting';
      this.running.remove(request);
      this.waiting.add(request);
    }
    this.incoming.expect(request, 0);
  }
}

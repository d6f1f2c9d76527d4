/**
 * The part of a prompt that a request does not compute: cached here already, brought in from the tier, or computed by another worker
 * for it (awaited-prompt.ts). Such a request leaves the queue with room for what comes, and is back in it when that has ended.
 */
import type { CacheHit, PrefixCache } from '@kvtier/prefix-cache';
import type { ArrivalList } from './arrival-list.ts';
import { AwaitedPrompts } from './awaited-prompts.ts';
import type { EngineLoad } from './engine-load.ts';
import { Head } from './head.ts';
import { type LoadEnd, Loads } from './loads.ts';
import { Lookups, type ToLoad } from './lookups.ts';
import type { EngineRequest } from './request.ts';
import type { Room } from './room.ts';
import type { SchedulerOptions } from './scheduler-options.ts';

/**
 * What became of a request that has no blocks yet: undefined, nothing comes for it; 'head', it has its room and computes its head while the
 * rest is loaded; see `Admission` of the scheduler.
 */
export type Departure = 'loading' | 'head' | 'later' | 'pending' | 'full' | undefined;

/** Of those that wait, in one pass: a question about a long prompt takes a third of a millisecond, and the executor stands still. */
const mostRenewed = 8;

export interface IncomingParts {
  readonly options: SchedulerOptions;
  readonly waiting: ArrivalList;
  readonly running: ArrivalList;
  readonly room: Room;
  readonly load: EngineLoad;
  /** All of a load lies in the arena. True: the next step will import it, or say no. */
  readonly onArrived: () => boolean;
}

export class Incoming {
  readonly loads: Loads;
  readonly lookups: Lookups;
  readonly handOffs: AwaitedPrompts;
  readonly counts = { promptTokens: 0, hitTokens: 0, loadedTokens: 0, loads: 0, shortLoads: 0, headLoads: 0 };
  readonly #options: SchedulerOptions;
  readonly #kv: PrefixCache;
  readonly #waiting: ArrivalList;
  readonly #running: ArrivalList;
  readonly #room: Room;
  readonly #load: EngineLoad;
  /** Some layers see only a window. */
  readonly #windows: boolean;
  /** Arrival of who was renewed last; the next turn begins behind it. */
  #renewed = -1;

  constructor({ options, waiting, running, room, load, onArrived }: IncomingParts) {
    const { kv, connector, clock, wake } = options;
    this.#options = options;
    this.#kv = kv;
    this.#waiting = waiting;
    this.#running = running;
    this.#room = room;
    this.#load = load;
    this.#windows = options.windows ?? false;
    this.lookups = new Lookups({ connector, clock, deadlineMs: options.matchDeadlineMs, wake });
    this.handOffs = new AwaitedPrompts(clock, kv.blockTokens, options.onHandOff);
    this.loads = new Loads({
      kv,
      connector,
      clock,
      deadlineMs: options.loadDeadlineMs,
      onEnd: (request, end) => this.#loadEnded(request, end),
      onArrived: options.importsByLayer ? onArrived : undefined,
      onFreed: wake,
    });
  }

  /** A new request: the tier is asked at once, and hinted at where the request has to wait. */
  ask(request: EngineRequest, hasToWait: boolean): void {
    const computed = this.#kv.getComputedBlocks(request);
    this.expect(request, computed.tokens);
    if (request.handOff) return; // the tier is asked when there is room
    this.#blocksToLoad(request, computed);
    if (hasToWait && request.mayLoad && request.hashes.blockCount > 0)
      this.#options.connector.prefetch(request.id, request.hashes.packed, computed.tokens / this.#kv.blockTokens);
  }

  /**
   * Whoever may begin in the next pass, which are as many as a step has places, is asked for anew when its answer is old, some of them in
   * each pass, in turn: in a queue that does not move nobody else asks, and what was known a minute ago would decide.
   */
  renewAnswers(): void {
    for (let left = mostRenewed; left > 0; left--) {
      const request = this.#waiting.afterAmong(this.#options.maxSequences, this.#renewed);
      this.#renewed = request?.arrival ?? -1;
      if (!request) return;
      if (!request.holdsBlocks) this.lookups.renew(request, this.#mostLoaded(request));
    }
  }

  /**
   * It holds no blocks: does it leave the queue, so that some come beyond what is cached here? `reserved`: what those before it that were
   * passed over wait for, which is no room for a wait for another worker; `kept`: of these, what is no room for a load either.
   */
  depart(request: EngineRequest, computed: CacheHit, reserved: number, kept: number): Departure {
    request.waitsBehind = undefined;
    const toAwait = this.#blocksToAwait(request, computed);
    if (toAwait > 0) {
      const departure = this.#await(request, computed, toAwait, reserved);
      // Room that is others' is a reason neither to take somebody's own nor to keep those waiting that come after.
      return departure === 'full' && reserved > 0 ? 'later' : departure;
    }
    const toLoad = this.#blocksToLoad(request, computed);
    if (toLoad === 'pending') return 'pending';
    if (toLoad.blocks === 0) return undefined;
    const { head, blocks } = toLoad;
    return head > 0
      ? this.#startHead(request, computed, toLoad, kept)
      : this.#startLoad(request, computed, blocks, kept);
  }

  /**
   * Blocks that are no room for a request's first `tokens` tokens, where it has to leave others `kept` blocks: those, and what the rest of
   * its own prompt takes, which would be theirs else.
   */
  keep(request: EngineRequest, tokens: number, kept: number): number {
    return kept > 0 ? kept + Math.max(0, request.counted.blocks - this.#load.blocksOf(tokens)) : 0;
  }

  /**
   * Whose prompt another worker computes leaves the queue at once, whatever runs: it has next to nothing to compute here, and nobody
   * begins with its prompt before it has its room. Room that those before it wait for stays theirs; the first one that finds
   * none ends the pass, so that a long queue is not looked up in every step. Nor are those of whose prompt nothing was missing here: they
   * wait for their places as any other. Their blocks may go meanwhile, so that `again` of the first of them are looked up again: those
   * behind have these before them.
   */
  departHandOffs(again: number): void {
    if (this.#awaitsMost || !this.#options.connector.attached) return;
    let [before, againLeft] = [0, again];
    const waiting = this.#waiting;
    for (let request = waiting.after(); request; request = waiting.after(request)) {
      const { handOff } = request;
      if (handOff?.state === 'open' && !request.holdsBlocks && (!handOff.isLocal || againLeft-- > 0)) {
        const computed = this.#kv.getComputedBlocks(request);
        const blocks = this.#blocksToAwait(request, computed);
        if (blocks > 0) {
          if (this.#await(request, computed, blocks, before) !== 'loading') return;
          continue;
        }
      }
      before += request.counted.blocks;
    }
  }

  /** As when this one was passed over, as many as may load, or wait for other workers. Who holds blocks waits for neither. */
  isFullFor({ waitsBehind, holdsBlocks }: EngineRequest): boolean {
    if (waitsBehind === undefined || holdsBlocks || !this.#options.connector.attached) return false;
    return waitsBehind === 'loads' ? this.#loadsMost : this.#awaitsMost;
  }

  get #loadsMost(): boolean {
    return this.loads.count - this.loads.awaitedCount >= this.#options.maxSequences;
  }

  get #awaitsMost(): boolean {
    return this.loads.awaitedCount >= this.#options.maxSequences;
  }

  /** It computes all that is not cached here. */
  hit(request: EngineRequest, computed: CacheHit): void {
    this.#skipHandOff(request, computed);
    this.#hit(request, computed);
  }

  /** Its first step: what its prompt got until then counts, once. A load that comes with the step counts when it has ended. */
  begun({ promptTokens, engineHitTokens, loadedTokens }: EngineRequest): void {
    this.counts.promptTokens += promptTokens;
    this.counts.hitTokens += Math.min(engineHitTokens, promptTokens);
    this.counts.loadedTokens += loadedTokens;
  }

  /** Another number of the prompt's first blocks is computed elsewhere. False: nothing waits for them any more. */
  changeHandOff(request: EngineRequest, blocks: number): boolean {
    const { handOff } = request;
    if (!handOff?.change(blocks)) return false;
    if (handOff.state !== 'awaiting') {
      request.waitsBehind = undefined;
      this.#options.wake(); // perhaps it need not wait any more
      return true;
    }
    this.expect(request, Math.max(request.computedTokens, blocks * this.#kv.blockTokens));
    this.loads.awaitOnly(request, blocks);
    return true;
  }

  /** Blocks beyond the local hit that should come from the tier. */
  #blocksToLoad(request: EngineRequest, hit: CacheHit): ToLoad | 'pending' {
    const isIdle = this.#mayHaveHead(request);
    return this.lookups.blocksToLoad(request, hit.tokens / this.#kv.blockTokens, this.#mostLoaded(request), isIdle);
  }

  /** Its steps keep nobody waiting, and all groups have every block of a prefix. */
  #mayHaveHead({ prefillOnly, handOff }: EngineRequest): boolean {
    const isIdle = this.#running.count === 0 && this.#waiting.count <= 1 && this.loads.count === 0;
    return isIdle && !this.#windows && !prefillOnly && !handOff;
  }

  /** Blocks of the chain that may come from elsewhere. */
  #mostLoaded(request: EngineRequest): number {
    // The last token is computed in any case; with a window it may look at a block that a longer prefix passes over.
    // A step imports no block that it writes to.
    const wholeBlocks = this.#windows || this.#options.importsByLayer;
    return wholeBlocks ? Math.floor((request.tokenCount - 1) / this.#kv.blockTokens) : request.hashes.blockCount;
  }

  #startLoad(request: EngineRequest, computed: CacheHit, blocks: number, kept: number): Departure {
    if (this.#loadsMost) {
      request.waitsBehind = 'loads';
      return 'later';
    }
    const reserved = this.keep(request, computed.tokens + blocks * this.#kv.blockTokens, kept);
    if (!this.#makeRoom(request, computed, blocks, 0, reserved)) return 'full';
    this.#skipHandOff(request, computed);
    this.#leave(request, computed, blocks);
    request.loadUs -= this.#options.clock.nowUs(); // until the end is added
    this.counts.loads++;
    this.loads.start(request, computed.tokens / this.#kv.blockTokens, blocks);
    return 'loading';
  }

  /** The load begins; the request leaves the queue for its first step, with room for all of its prompt. */
  #startHead(request: EngineRequest, computed: CacheHit, { head, blocks }: ToLoad, kept: number): Departure {
    const { blockTokens } = this.#kv;
    if (!this.#makeRoom(request, computed, 0, request.tokenCount - computed.tokens, kept)) return 'full';
    this.#hit(request, computed);
    this.#waiting.remove(request);
    request.waitsBehind = undefined;
    const endBlock = computed.tokens / blockTokens + head;
    request.head = new Head(endBlock * blockTokens, blocks * blockTokens);
    this.counts.loads++;
    this.counts.headLoads++;
    this.loads.start(request, endBlock, blocks);
    return 'head';
  }

  /** All of its head is computed now. */
  headEnds({ head, computedTokens }: EngineRequest): boolean {
    if (!head || computedTokens < head.endTokens) return false;
    if (head.isLoading) head.waitsSinceUs ??= this.#options.clock.nowUs();
    return true;
  }

  /** Where head and load are both over, the request goes on behind what has come. */
  passOver(request: EngineRequest): void {
    const { head } = request;
    if (!head || head.loadedTokens === undefined || request.computedTokens < head.endTokens) return;
    request.head = undefined;
    if (head.loadedTokens === 0) return;
    const isOffered = request.offeredBlocks * this.#kv.blockTokens === head.endTokens;
    const end = head.endTokens + head.loadedTokens;
    request.computedTokens = Math.min(end, request.tokenCount - 1);
    this.#kv.cacheBlocks(request, request.computedTokens);
    // The tier holds these: it is not asked about them again.
    if (isOffered) request.offeredBlocks = Math.floor(request.computedTokens / this.#kv.blockTokens);
    this.#load.settle(request);
  }

  /** It has ended: no step uses its blocks, and the load still does. */
  leaveLoad(request: EngineRequest): void {
    request.head = undefined;
    request.holdsBlocks = false;
    this.loads.abandon(request);
  }

  /** Room for the hit, for `blocks` blocks behind it that are to come, and for `newTokens` behind these. False: there is none. */
  #makeRoom(request: EngineRequest, computed: CacheHit, blocks: number, newTokens: number, reserved = 0): boolean {
    const externalTokens = blocks * this.#kv.blockTokens;
    const admitted = this.#kv.allocateSlots(request, newTokens, {
      computed,
      externalComputedTokens: externalTokens,
      delayCacheBlocks: true,
      fullSequenceMustFit: true,
      reservedBlocks: this.#room.promisedBlocks() + reserved,
    });
    return admitted !== null;
  }

  /** Out of the queue, until the blocks have come. */
  #leave(request: EngineRequest, computed: CacheHit, blocks: number): void {
    this.#hit(request, computed);
    this.#waiting.remove(request);
    request.waitsBehind = undefined; // it has its room, also when it comes back to the queue
    request.state = 'loading';
    this.expect(request, computed.tokens + blocks * this.#kv.blockTokens);
  }

  /** Blocks beyond the local hit that another worker computes, where that can be waited for. */
  #blocksToAwait(request: EngineRequest, hit: CacheHit): number {
    const { handOff } = request;
    if (handOff?.state !== 'open' || !this.#options.connector.attached) return 0;
    const end = Math.min(handOff.blocks, this.#mostLoaded(request));
    const blocks = Math.max(0, end - hit.tokens / this.#kv.blockTokens);
    handOff.isLocal = blocks === 0;
    return blocks;
  }

  /** `reserved`: blocks that are others'. */
  #await(request: EngineRequest, computed: CacheHit, blocks: number, reserved = 0): Departure {
    if (this.#awaitsMost) {
      request.waitsBehind = 'hand-offs';
      return 'later';
    }
    const localBlocks = computed.tokens / this.#kv.blockTokens;
    // Where windows bound what a sequence holds, the rest of the prompt is not laid out at once.
    const rest = this.#windows ? 0 : request.tokenCount - (localBlocks + blocks) * this.#kv.blockTokens;
    if (!this.#makeRoom(request, computed, blocks, Math.max(0, rest), reserved)) return 'full';
    this.handOffs.begin(request, localBlocks);
    this.#leave(request, computed, blocks);
    const { stallMs, deadlineMs } = request.handOff!;
    const onCame = (came: number): void => this.#options.onCame(request, localBlocks, localBlocks + came);
    this.loads.start(request, localBlocks, blocks, { stallMs, deadlineMs, onCame });
    return 'loading';
  }

  #skipHandOff(request: EngineRequest, computed: CacheHit): void {
    this.handOffs.skip(request, computed.tokens / this.#kv.blockTokens, this.#mostLoaded(request));
  }

  /** A load is over; the request goes on where its good blocks end. */
  #loadEnded(request: EngineRequest, end: LoadEnd | undefined): void {
    if (request.head) {
      this.#headLoadEnded(request, request.head, end);
      return;
    }
    if (request.state === 'finished') {
      // While a step imported, which counted on all of it: its blocks go when that has ended, and are worth what arrived.
      request.computedTokens = 0;
      if (end && !this.#isLost(request, end)) this.#arrived(request, end);
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
      this.#arrived(request, end);
      // Who computes for another worker asks about these, too: they are to lie in this node.
      if (end.firstBlock === 0 && !request.prefillOnly) request.offeredBlocks = end.loaded;
      if (end.first) this.#loaded(request, end, withStep);
    } else {
      this.#forgetBlocks(request);
      request.engineHitTokens = 0;
    }
    if (!end || end.loaded < end.wanted) {
      // A table that was laid out for a longer prefix says nothing against a shorter one: that is tried, once. Nor does room that was
      // given up say anything against the tier: the other worker may have gone on meanwhile.
      const gaveUp = wasAwaited && request.handOff!.isRevoked;
      request.mayLoad = gaveUp || (lost && request.lostLoads === 1);
      if (!wasAwaited) this.counts.shortLoads++;
    }
    // How long another worker took says nothing of the tier.
    if (end && !wasAwaited) this.#load.loaded(end.byTier, end.elapsedUs / 1e6, this.#options.clock.nowUs());
    this.expect(request, 0);
    if (withStep) return; // it goes on in the next step
    this.#waiting.add(request);
    this.#options.wake();
  }

  /** What its prompt got by its first load. `hasBegun`: its first step counted without it. */
  #loaded(request: EngineRequest, { byTier, loaded }: LoadEnd, hasBegun: boolean): void {
    const left = Math.max(0, request.promptTokens - request.engineHitTokens);
    request.loadedByTier = byTier;
    request.loadedTokens = Math.min(loaded * this.#kv.blockTokens, left);
    if (hasBegun) this.counts.loadedTokens += request.loadedTokens;
  }

  /** Its table is gone, or the connector's. */
  #forgetBlocks(request: EngineRequest): void {
    request.computedTokens = 0;
    request.offeredBlocks = 0;
    request.holdsBlocks = false;
  }

  /** `end` undefined: the connector has broken its own deadline. */
  #headLoadEnded(request: EngineRequest, head: Head, end: LoadEnd | undefined): void {
    if (head.waitsSinceUs !== undefined) request.headWaitUs += this.#options.clock.nowUs() - head.waitsSinceUs;
    if (!end || end.loaded < end.wanted) {
      request.mayLoad = false;
      this.counts.shortLoads++;
    }
    if (!end) {
      request.head = undefined;
      this.#forgetBlocks(request);
      this.#running.remove(request);
      request.state = 'waiting';
      this.expect(request, 0);
      this.#waiting.add(request);
      this.#options.wake();
      return;
    }
    head.loaded(end.loaded * this.#kv.blockTokens);
    if (request.state === 'finished') return; // a step uses its blocks still, and lets them go
    request.hasHit ||= end.loaded > 0;
    if (end.first) this.#loaded(request, end, true);
    this.#load.loaded(end.byTier, end.elapsedUs / 1e6, this.#options.clock.nowUs());
    if (!request.executing) this.passOver(request);
    this.#load.settle(request);
    this.#options.wake();
  }

  /** The request has these blocks, and others find them; at least its last token is computed, for its logits. */
  #arrived(request: EngineRequest, { firstBlock, loaded }: LoadEnd): void {
    request.computedTokens = Math.min((firstBlock + loaded) * this.#kv.blockTokens, request.tokenCount - 1);
    request.hasHit ||= loaded > 0;
    this.#kv.cacheBlocks(request, request.computedTokens);
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
    request.hasHit = hit.tokens > 0;
    request.computedTokens = hit.tokens;
    request.offeredBlocks = 0; // hits are offered again: the tier may have lost them, and what it holds it touches
    request.offers = undefined;
    if (first) {
      request.engineHitTokens = hit.tokens;
      request.loadedByTier = {};
      request.loadedTokens = 0;
    }
    this.#kv.recordLookup(request.tokenCount, hit.tokens, !first);
  }

  /** So many of its tokens will not have to be computed. */
  expect(request: EngineRequest, tokens: number): void {
    const { handOff } = request;
    const elsewhere = handOff?.state === 'open' ? handOff.blocks * this.#kv.blockTokens : 0;
    request.expectedTokens = Math.max(tokens, elsewhere);
    this.#load.settle(request);
  }
}

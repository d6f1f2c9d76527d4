/**
 * Prefixes that are asked for so often that those which hold them will soon not be enough, and which other worker should have each brought
 * in ahead; and what a worker that has just joined should have first. Pure: it says what to copy; who brings it is told, and tells.
 *
 *     bring = blocks ÷ blocks a second from other hosts             serve = tail ÷ prefill rate + answer × what a request adds to a step
 *     holders needed = ⌈ prompts a second × serve × (target + serve) ÷ target ⌉,        target = bring, at most `targetS`
 *
 * (of a queue with one server, waiting = load ÷ (1 − load) × serve: as soon as waiting for a holder would take as long as bringing the
 * prefix in, another one is needed; Mooncake copies when a request comes, FAST'25). The rate is what is expected: more where it
 * grows. What gains most goes first: prompts a second × bring.
 *
 * Invariants: nothing is copied that no worker holds, that is slower to bring than to compute, or that is under way; at most `maxUnderWay`
 * copies at once and on average `bytesPerS`; what does not come in time is not tried there again for a minute. Who refuses is
 * asked again after a second, then after twice as long each time: a worker that has just joined may not have its cache node yet.
 */
import type { Keys } from '@kvtier/kv-index';
import type { StatesFor } from '../look.ts';
import type { RoutedRequest, WorkerState } from '../policy.ts';
import type { Budget } from './budget.ts';
import { type Prefix, PrefixCounts } from './prefix-counts.ts';

export interface CopyPlannerOptions {
  /** Of all planners that share it. */
  readonly budget: Budget;
  /** Waiting for a holder that is never too long. */
  readonly targetS: number;
  readonly maxNodes?: number;
  readonly maxBlocks?: number;
  /** Blocks of which something may be kept (`Came.keep`), in all. */
  readonly maxKeptBlocks?: number;
}

/** One prefix to one worker. */
export interface Copy<T> {
  readonly worker: number;
  /** new: the worker has just joined. */
  readonly why: 'hot' | 'new';
  /** Whole blocks from the root on; of these, those that it has to bring in. */
  readonly blocks: number;
  readonly brings: number;
  /** It counts as late then, and need not go on. */
  readonly withinMs: number;
  readonly kept: T;
}

/** How a copy ended. late: it did not come in time. */
export type CopyEnd = 'came' | 'late' | 'refused' | 'left';
type Ended<T> = (copy: Copy<T>, how: CopyEnd) => void;

interface Kept<T> {
  readonly value: T;
  readonly keys: Keys;
  readonly blockTokens: number;
}

interface Open<T> extends Copy<T> {
  readonly request: RoutedRequest;
  readonly untilMs: number;
  readonly bytes: number;
}

/** Of a prefix, what counts as holding it. */
const most = 0.9;
/** Prompts that a prefix had before it is thought about. */
const leastArrivals = 3;
/** Copied for at least so many prompts, expected within `horizonS`. */
const leastUses = 2;
const horizonS = 30;
/** Prefixes that one look considers. */
const maxLooked = 16;
/** A worker counts as one that has just joined. */
const newMs = 60_000;
/** A copy has so many times as long as it should take, and `graceMs`. */
const patience = 4;
const graceMs = 2_000;
const againMs = 60_000;
const refusedMs = 1_000;
const maxFailed = 1_024;

export class CopyPlanner<T> {
  readonly #options: CopyPlannerOptions;
  readonly #counts: PrefixCounts<Kept<T>>;
  readonly #maxKeptBlocks: number;
  #keptBlocks = 0;
  #open: Open<T>[] = [];
  readonly #joinedMs = new Map<number, number>();
  /** By worker and last hash, what did not come: until when it is not tried there, and how long that is. */
  readonly #failed = new Map<string, { readonly untilMs: number; readonly waitMs: number }>();

  constructor(options: CopyPlannerOptions) {
    this.#options = options;
    this.#maxKeptBlocks = options.maxKeptBlocks ?? 1 << 18;
    this.#counts = new PrefixCounts({ maxNodes: options.maxNodes ?? 2_048, maxBlocks: options.maxBlocks ?? 1 << 17 });
  }

  get underWay(): number {
    return this.#open.length;
  }

  /** A prompt came. `keep`: what a worker needs to bring in its first `blocks` blocks. */
  came(request: RoutedRequest, keep: (blocks: number) => T, nowMs: number): void {
    const { keys, blockTokens } = request;
    this.#counts.came(request, nowMs, (prefix, perS) => {
      if (prefix.kept !== undefined || prefix.arrivals < leastArrivals - 1 || perS * horizonS < leastUses) return;
      if (this.#keptBlocks + prefix.blocks > this.#maxKeptBlocks) return;
      this.#keptBlocks += prefix.blocks;
      prefix.kept = { value: keep(prefix.blocks), keys: keys.slice(0, 2 * prefix.blocks), blockTokens };
    });
    this.#keptBlocks -= this.#counts.releasedBlocks();
  }

  /** This number is a worker that holds nothing yet. */
  joined(worker: number, nowMs: number): void {
    this.#joinedMs.set(worker, nowMs);
  }

  /** It is none, or another one. What was under way to it has ended. */
  left(worker: number): Copy<T>[] {
    this.#joinedMs.delete(worker);
    for (const place of this.#failed.keys()) if (place.startsWith(`${worker} `)) this.#failed.delete(place);
    const gone = this.#open.filter((copy) => copy.worker === worker);
    this.#open = this.#open.filter((copy) => copy.worker !== worker);
    for (const { bytes } of gone) this.#options.budget.unused(bytes);
    return gone;
  }

  /** It could not even be asked for. False: it has ended already. */
  refused(copy: Copy<T>, nowMs: number): boolean {
    const open = this.#open.find((one) => one === copy);
    if (open === undefined) return false;
    const { waitMs } = this.#failed.get(placeOf(open)) ?? { waitMs: refusedMs / 2 };
    this.#open = this.#open.filter((one) => one !== open);
    this.#options.budget.unused(open.bytes);
    this.#failedThere(open, nowMs, Math.min(2 * waitMs, againMs));
    return true;
  }

  /** What is under way counts no more. */
  close(): void {
    for (const { bytes } of this.#open) this.#options.budget.ended(bytes);
    this.#open = [];
  }

  /** What has ended since. */
  settle(nowMs: number, statesFor: StatesFor, ended: Ended<T>): void {
    for (const copy of [...this.#open]) {
      const state: WorkerState | undefined = statesFor(copy.request)[copy.worker];
      if (state !== undefined && state.match.blocks >= copy.blocks * most) {
        this.#end(copy);
        this.#failed.delete(placeOf(copy));
        ended(copy, 'came');
      } else if (nowMs > copy.untilMs) {
        this.#end(copy);
        this.#failedThere(copy, nowMs, againMs);
        ended(copy, 'late');
      }
    }
  }

  /** The same, and what should begin now. `blockBytes`: of one block. */
  look(nowMs: number, blockBytes: number, statesFor: StatesFor, ended: Ended<T>): Copy<T>[] {
    this.settle(nowMs, statesFor, ended);
    for (const [worker, atMs] of this.#joinedMs) if (nowMs - atMs > newMs) this.#joinedMs.delete(worker);
    const begun: Copy<T>[] = [];
    const { budget } = this.#options;
    if (!budget.mayBegin(nowMs)) return begun;
    for (const { prefix, perS } of this.#hottest(nowMs)) {
      const copy = this.#copyOf(prefix, perS, statesFor, nowMs, blockBytes);
      if (copy === undefined) continue;
      budget.begun(copy.bytes);
      this.#open.push(copy);
      begun.push(copy);
      if (!budget.mayBegin(nowMs)) break;
    }
    return begun;
  }

  #hottest(nowMs: number): { prefix: Prefix<Kept<T>>; perS: number }[] {
    const hottest: { prefix: Prefix<Kept<T>>; perS: number; gain: number }[] = [];
    for (const { prefix, perS } of this.#counts.all(nowMs, leastArrivals)) {
      if (prefix.kept === undefined || perS * horizonS < leastUses) continue;
      hottest.push({ prefix, perS, gain: perS * prefix.blocks });
    }
    return hottest.sort((a, b) => b.gain - a.gain).slice(0, maxLooked);
  }

  #copyOf(
    prefix: Prefix<Kept<T>>,
    perS: number,
    statesFor: StatesFor,
    nowMs: number,
    blockBytes: number,
  ): Open<T> | undefined {
    const { keys, blockTokens, value } = prefix.kept!;
    const { blocks } = prefix;
    const request = { tokens: blocks * blockTokens, blockTokens, maxTokens: 1, keys, session: '' };
    const states = statesFor(request);
    const enough = Math.ceil(blocks * most);
    const id = idOf(keys);
    let holders = this.#open.filter((open) => idOf(open.request.keys) === id).length;
    let all = 0;
    let fits: number | undefined;
    let fitsNew: number | undefined;
    let bringS = 0;
    let prefillTokensPerS = 0;
    let stepPerRequestS = 0;
    for (let worker = 0; worker < states.length; worker++) {
      const state = states[worker];
      if (state === undefined) continue;
      all++;
      prefillTokensPerS += state.prefillTokensPerS;
      stepPerRequestS += state.stepPerRequestS;
      const { match, remoteBlocks } = state;
      if (match.blocks >= enough) holders++;
      else if (match.blocks + remoteBlocks >= enough && this.#mayBring(worker, id, nowMs)) {
        const thisS = bringOf(state, blockTokens);
        if (thisS === undefined) continue;
        const isSooner = (than: number | undefined): boolean =>
          than === undefined || state.tokensAhead < states[than]!.tokensAhead;
        if (isSooner(fits)) {
          fits = worker;
          bringS = thisS;
        }
        if (this.#joinedMs.has(worker) && isSooner(fitsNew)) fitsNew = worker;
      }
    }
    if (fits === undefined) return undefined;
    const serveS =
      (prefix.tailTokens * all) / prefillTokensPerS + (prefix.answerTokens * stepPerRequestS) / Math.max(all, 1);
    const targetS = Math.max(Math.min(bringS, this.#options.targetS), 0.001);
    const needed = Math.ceil((perS * serveS * (targetS + serveS)) / targetS);
    const isNew = fitsNew !== undefined && (perS * horizonS) / all >= leastUses / 2;
    if (!isNew && (holders >= needed || (perS * horizonS) / (holders + 1) < leastUses)) return undefined;
    const worker = isNew ? fitsNew! : fits;
    const brings = states[worker]!.remoteBlocks;
    const withinMs = graceMs + patience * 1000 * (bringOf(states[worker]!, blockTokens) ?? 0);
    return {
      ...{ worker, why: isNew ? 'new' : 'hot', blocks, brings, withinMs, kept: value, request },
      ...{ untilMs: nowMs + withinMs, bytes: brings * blockBytes },
    };
  }

  #mayBring(worker: number, id: string, nowMs: number): boolean {
    // One at a time: what is under way to it says nothing of the next one yet.
    for (const open of this.#open) if (open.worker === worker) return false;
    const failed = this.#failed.get(`${worker} ${id}`);
    return failed === undefined || failed.untilMs <= nowMs;
  }

  #end(copy: Open<T>): void {
    this.#open = this.#open.filter((open) => open !== copy);
    this.#options.budget.ended(copy.bytes);
  }

  #failedThere(copy: Open<T>, nowMs: number, waitMs: number): void {
    if (this.#failed.size >= maxFailed) this.#failed.delete(this.#failed.keys().next().value!);
    this.#failed.set(placeOf(copy), { untilMs: nowMs + waitMs, waitMs });
  }
}

/** The last hash names the whole prefix. */
const idOf = (keys: Keys): string => `${keys.at(-2)} ${keys.at(-1)}`;

const placeOf = ({ worker, request }: Open<unknown>): string => `${worker} ${idOf(request.keys)}`;

/** Seconds until it has what it lacks; undefined: computing it would be faster. */
function bringOf(state: WorkerState, blockTokens: number): number | undefined {
  const perS = state.loadBlocksPerS[state.remoteMedium] ?? 0;
  return perS * blockTokens > state.prefillTokensPerS ? state.remoteBlocks / perS : undefined;
}

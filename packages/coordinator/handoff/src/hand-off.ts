/**
 * One hand-off: two calls at once, that both end here.
 *
 *     D.Generate(hand_off) ─► D has room, and says so ─► P.Generate(prefill_only) ─► blocks lie in P's node ─► D brings them in ─► tokens
 *                                                                   └─► the first token, where P computes all of the prompt; D is told it
 *
 * The calls are the lease: nothing of a hand-off outlives this object's `run`, and it ends with the signal, with D's stream, or with a
 * failure. P is asked only once D has reserved its room, and never for what D holds. P that fails, dies, or has no block for
 * `stallMs` gives way to another one, `tries` in all; without one D is told to compute the rest, which it would do by itself a
 * little later.
 *
 * Invariant: when `run` settles, no call of the hand-off runs, none is counted on a worker, and nothing more is told.
 */
import type { Share, Workers } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { OnEvent } from '@kvtier/registry';
import type { GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import type { Split } from './decision.ts';
import { EarlyToken } from './early-token.ts';
import type { Transfer } from './link-rate.ts';
import type { Nodes } from './node-links.ts';

/** Why a hand-off was less than was wanted. */
export const shortfalls = [
  /** the prefill worker ended the call, or its connection was lost */
  'prefill-died',
  /** it refused: it is full, or drains, or does not serve such a request */
  'prefill-refused',
  /** it had no further block for too long */
  'prefill-stalled',
  /** it ended with fewer blocks in its node than it was asked for */
  'prefill-short',
  /** the decode worker began before the blocks were in: it waited too long, or could not bring them in */
  'decode-alone',
] as const;
export type Shortfall = (typeof shortfalls)[number];

/** What a hand-off asks of the workers: the registry's fleet is this. */
export interface HandOffEngines extends Workers {
  /** Cache nodes that discovery knows: another list when anything has changed. Without it any may fetch from any. */
  nodes?(): Nodes;
  follow(number: number, request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void>;
  engine(number: number): {
    changeHandOff(requestId: string, blocks: number): Promise<boolean>;
    tellFirstToken(requestId: string, tokenId: number): Promise<boolean>;
  };
}

export interface HandOffTimes {
  /** So long without another block, a prefill worker is given up. */
  readonly stallMs: number;
  /** The decode worker waits so long in all. */
  readonly deadlineMs: number;
}

export interface HandOffOptions {
  readonly engines: HandOffEngines;
  readonly decode: number;
  readonly request: GenerateRequest;
  readonly split: Split;
  readonly blockTokens: number;
  readonly times: HandOffTimes;
  /** Prefill workers that are asked one after another, at most. */
  readonly tries: number;
  readonly listener: HandOffListener;
}

/** What the time to the decode side's first token went by, one after the other, in microseconds; what overlaps counts once, where it came first. */
export interface Took {
  /** The prefill side gave the first token: `transferUs` and `tailUs` passed behind it. */
  readonly isEarly: boolean;
  /** Until the decode side has room. */
  readonly admitUs: number;
  /** At the prefill side: until it begins, its loads among it, and until it has computed all. */
  readonly queueUs: number;
  readonly prefillUs: number;
  /** From then on, until the last block is in; the rest of the prompt. */
  readonly transferUs: number;
  readonly tailUs: number;
}

export interface HandOffListener {
  /** A leg at this prefill worker begins (`began`), or has ended. */
  leg(prefill: Split['prefill'], began: boolean): void;
  /** So many blocks have still to travel from the prefill side's node. */
  pending(blocks: number): void;
  /** The first block lies in the prefill side's node: from then on they may travel. Once. */
  ready(): void;
  /** So many more have come from there to the decode side. */
  came(blocks: number): void;
  /** Something fell short; for the answer's headers, and metrics. */
  fellShort(why: Shortfall, error?: KvError): void;
  /** Another prefill worker for the same blocks, without those that failed; undefined: there is none. */
  another(except: ReadonlySet<number>): Split | undefined;
  /**
   * The first token is here. Of the blocks: those that the decode side held itself, those that it had from elsewhere, and of these
   * those that were there before all were computed.
   */
  firstToken(local: number, come: number, hidden: number): void;
  /** Of one that came as it should: before the first token is passed on, or with the prefill side's last word, where that comes later. */
  took(took: Took): void;
  /**
   * Seconds from the token that the prefill side gave (`isGiven`) until the decode side's next one: a pause that a client saw, whatever fell short
   * meanwhile. Else from its last block until the decode side's first token, of what came as it should. Once.
   */
  paused(seconds: number, isGiven: boolean): void;
  /** Blocks travelled so fast; the last of them was there by then: performance.now(). Before `came` tells of these. */
  travelled(transfer: Transfer, cameMs: number): void;
}

/** Of a request: what a leg of prefill has none of. */
const ofTheAnswer = ['kvCacheReportMode', 'betweenMs'] as const;
const ended = new KvError('CANCELLED', 'the hand-off is over');
/** The prefill side's last word may come so much later than the token that its blocks made. */
const lastWordMs = 50;

export class HandOff {
  readonly #options: HandOffOptions;
  readonly #over = new AbortController();
  #leg: Promise<void> | undefined;
  #early: EarlyToken | undefined;
  /** As the decode side said; undefined: it has not yet. */
  #local: number | undefined;
  /** Blocks in the prefill side's node. */
  #ready = 0;
  #hasToken = false;
  /** The decode side waits no more, and computes the rest itself. */
  #goesOn = false;
  /** Blocks that do not lie in the decode side's own node; 0: it is the prefill side's, too. */
  #travels: number;
  /**
   * What came tells of the link: one worker computed it, and what need not travel had come when its first block was ready. Else the decode
   * side's node has lost some of that, or it was waited for.
   */
  #isMeasured = false;
  /** When the first block was ready, and when all were: performance.now(). */
  #firstReadyMs: number | undefined;
  #allReadyMs: number | undefined;
  readonly #begunMs = performance.now();
  #admittedMs: number | undefined;
  /** As the prefill side's last event says. */
  #prefilled: { readonly queueUs: number; readonly prefillUs: number } | undefined;
  /** That have come to the decode side; and that had when all were computed. */
  #came = 0;
  #cameHidden = 0;
  #fellShort = false;
  #hasPaused = false;
  /** When the last block was in at the decode side, and how long the rest of the prompt took; undefined: not known, or `took` is told. */
  #tail: { readonly cameMs: number; readonly us: number } | undefined;
  #lastWord: NodeJS.Timeout | undefined;
  #waited: NodeJS.Timeout | undefined;

  constructor(options: HandOffOptions) {
    this.#options = options;
    this.#travels = options.split.travels;
  }

  /** Events of the hand-off itself are not passed on. @throws as the decode side's stream, or the reason of `signal` */
  async run(signal: AbortSignal, onEvent: OnEvent): Promise<void> {
    const { engines, decode, request, split, times } = this.#options;
    const { stallMs, deadlineMs } = times;
    // The decode side waits for two prefill workers in turn before it computes by itself.
    const handOff = { blocks: split.blocks, stallMs: Math.min(2 * stallMs, deadlineMs), deadlineMs };
    const early = new EarlyToken(request.requestId, onEvent);
    this.#early = early;
    const either = AbortSignal.any([signal, early.signal]);
    this.#options.listener.pending(this.#leftOf(0));
    this.#options.listener.leg(split.prefill, true);
    let isCounted = true;
    const sent = engines.sent(split.prefill.number, this.#shareOf(split, request.requestId, 1));
    const uncount = (): void => {
      if (!isCounted) return;
      isCounted = false;
      sent.ended();
      this.#options.listener.leg(split.prefill, false);
    };
    try {
      await engines.follow(decode, { ...request, handOff }, either, (event) => {
        const { tokenIds, finishReason, handOff: state } = event;
        if (state !== undefined && tokenIds.length === 0 && finishReason === '') {
          if (this.#local !== undefined) {
            this.#haveCome(Math.min(state.readyBlocks, split.blocks));
            if (!this.#goesOn) this.#options.listener.pending(this.#leftOf(this.#came));
            return undefined; // that it has room is said once
          }
          this.#local = Math.min(state.localBlocks, split.blocks);
          this.#admittedMs = performance.now();
          // Then it computes the rest itself, and what a prefill worker still does nobody takes.
          this.#waited = setTimeout(() => {
            this.#waitsNoMore();
            this.#over.abort(ended);
          }, deadlineMs);
          this.#came = this.#local;
          this.#options.listener.pending(this.#leftOf(this.#local));
          if (this.#local >= split.blocks) uncount();
          else this.#leg = this.#prefill(split, uncount);
          return undefined;
        }
        this.#token(event);
        const passed = early.pass(event);
        this.#tellPause(event);
        return passed;
      });
    } catch (error) {
      if (!early.isOver || signal.aborted) throw error;
    } finally {
      clearTimeout(this.#lastWord);
      clearTimeout(this.#waited);
      this.#over.abort(ended);
      early.leave();
      this.#options.listener.pending(0);
      await this.#leg;
      uncount();
    }
  }

  #token({ cache }: GenerateEvent): void {
    if (this.#hasToken) return;
    this.#hasToken = true;
    const { split, blockTokens, listener } = this.#options;
    const had = cache === undefined ? this.#ready * blockTokens : cache.cachedTokens;
    if (had < split.blocks * blockTokens && !this.#fellShort) {
      this.#fellShort = true;
      listener.fellShort('decode-alone');
    }
    const local = this.#local ?? 0;
    const come = Math.max(Math.min(Math.floor(had / blockTokens), split.blocks) - local, 0);
    const hidden = Math.min(Math.max(this.#cameHidden - local, 0), come);
    listener.firstToken(local, come, hidden);
    if (cache?.tailUs !== undefined) {
      const cameMs = performance.now() - cache.tailUs / 1000;
      this.#tail = { cameMs, us: cache.tailUs };
      if (this.#isMeasured && this.#firstReadyMs !== undefined && this.#allReadyMs !== undefined) {
        const [tookS, afterS] = [this.#firstReadyMs, this.#allReadyMs].map((ms) => Math.max(cameMs - ms, 0) / 1000);
        const blocks = this.#leftOf(local) - this.#leftOf(local + come);
        const lastBlocks = Math.min(come - hidden, blocks);
        listener.travelled({ blocks, lastBlocks, tookS: tookS!, afterS: afterS! }, cameMs);
      }
      this.#tellTook();
    }
    // That the last of them came is told with the token alone; and none is waited for any more.
    this.#haveCome(local + come);
    listener.pending(0);
    // Whatever a prefill worker still computes, nobody waits for it; what it has computed, it says in a moment.
    if (this.#tail === undefined || this.#fellShort) this.#over.abort(ended);
    else this.#lastWord = setTimeout(() => this.#over.abort(ended), lastWordMs);
  }

  #haveCome(blocks: number): void {
    if (blocks <= this.#came) return;
    const travelled = this.#leftOf(this.#came) - this.#leftOf(blocks);
    this.#came = blocks;
    if (travelled > 0) this.#options.listener.came(travelled);
  }

  /**
   * Blocks that have still to travel when the decode side has so many. What lies in its own node is told as any other, and comes first:
   * it is there already.
   */
  #leftOf(come: number): number {
    return Math.min(this.#options.split.blocks - come, this.#travels);
  }

  /** However long its own computing takes: what has not come until then does not travel any more. */
  #waitsNoMore(): void {
    this.#goesOn = true;
    this.#options.listener.pending(0);
  }

  #tellPause({ tokenIds }: GenerateEvent): void {
    if (this.#hasPaused || tokenIds.length === 0) return;
    const { isGiven, pauseS } = this.#early!;
    if (isGiven && pauseS === undefined) return;
    this.#hasPaused = true;
    const readyMs = this.#fellShort ? undefined : this.#allReadyMs;
    if (pauseS !== undefined) this.#options.listener.paused(pauseS, true);
    else if (readyMs !== undefined) this.#options.listener.paused((performance.now() - readyMs) / 1_000, false);
  }

  /** Once both sides have said theirs. */
  #tellTook(): void {
    if (this.#tail === undefined || this.#allReadyMs === undefined) return;
    if (this.#prefilled === undefined || this.#admittedMs === undefined) return;
    const { cameMs, us: tailUs } = this.#tail;
    this.#tail = undefined;
    const admitUs = Math.round((this.#admittedMs - this.#begunMs) * 1_000);
    const transferUs = Math.round(Math.max(cameMs - this.#allReadyMs, 0) * 1_000);
    const isEarly = this.#early!.isGiven;
    this.#options.listener.took({ isEarly, admitUs, ...this.#prefilled, transferUs, tailUs });
  }

  /** The leg of prefill, at one worker after another. Never throws. */
  async #prefill(first: Split, uncountFirst: () => void): Promise<void> {
    const { request, tries, listener, engines } = this.#options;
    const failed = new Set<number>();
    let split: Split | undefined = first;
    for (let number = 1; split !== undefined; number++) {
      let why: Shortfall | undefined;
      let error: KvError | undefined;
      const sent =
        number === 1 ? undefined : engines.sent(split.prefill.number, this.#shareOf(split, request.requestId, number));
      if (sent !== undefined) listener.leg(split.prefill, true);
      try {
        why = await this.#ask(split, legId(request.requestId, number));
      } catch (thrown) {
        error = KvError.from(thrown);
        why = shortfallOf(error);
      } finally {
        if (sent === undefined) uncountFirst();
        else {
          sent.ended();
          listener.leg(split.prefill, false);
        }
      }
      if (this.#over.signal.aborted || this.#early!.isOver || this.#hasToken) return;
      if (why === undefined) return;
      this.#fellShort = true;
      listener.fellShort(why, error);
      failed.add(split.prefill.number);
      const next: Split | undefined = number < tries ? listener.another(failed) : undefined;
      if (next === undefined) break;
      split = next;
      this.#travels = split.travels;
      this.#isMeasured = false;
      listener.pending(this.#leftOf(this.#came));
    }
    await this.#goOnAlone();
  }

  /** The decode side takes what is there, and computes the rest. One that does not answer ends its own stream. */
  async #goOnAlone(): Promise<void> {
    const { engines, decode, request } = this.#options;
    const { signal } = this.#over;
    this.#waitsNoMore();
    // Where it fails: the stream says what is wrong with the worker, and it waits no longer than it was told at first.
    await new Promise<void>((resolve) => {
      signal.addEventListener('abort', () => resolve(), { once: true });
      Promise.resolve()
        .then(() => engines.engine(decode).changeHandOff(request.requestId, 0))
        .then(
          () => resolve(),
          () => resolve(),
        );
    });
  }

  /** The decode side goes on behind the first token. One that does not hear of it draws it itself. */
  #tell(tokenId: number): void {
    const { engines, decode, request } = this.#options;
    Promise.resolve()
      .then(() => engines.engine(decode).tellFirstToken(request.requestId, tokenId))
      .catch(() => undefined);
  }

  /** Returns what fell short; undefined: all blocks lie in its node. @throws what its stream ended with */
  async #ask({ prefill, blocks, stepBlocks, draws }: Split, requestId: string): Promise<Shortfall | undefined> {
    const { engines, request, times } = this.#options;
    // One is enough.
    const isAsked = draws && !this.#early!.isGiven;
    const leg = new AbortController();
    const leave = (): void => leg.abort(ended);
    this.#over.signal.addEventListener('abort', leave, { once: true });
    if (this.#over.signal.aborted) leave();
    let isStalled = false;
    let ready = 0;
    const stall = setTimeout(() => {
      isStalled = true;
      leg.abort(ended);
    }, times.stallMs);
    const read: OnEvent = (event: GenerateEvent) => {
      const { handOff, finishReason, cache, tokenIds } = event;
      if (cache !== undefined) this.#prefilled = { queueUs: cache.queueUs + cache.loadUs, prefillUs: cache.prefillUs };
      const now = Math.min(handOff?.readyBlocks ?? ready, blocks);
      if (now > ready || finishReason !== '') stall.refresh();
      ready = Math.max(now, ready);
      if (ready > 0 && this.#firstReadyMs === undefined) {
        this.#firstReadyMs = performance.now();
        this.#isMeasured = this.#came + this.#travels >= blocks;
        this.#options.listener.ready();
      }
      if (ready >= blocks && this.#allReadyMs === undefined) {
        this.#allReadyMs = performance.now();
        this.#cameHidden = this.#came;
      }
      this.#ready = Math.max(this.#ready, ready);
      if (this.#hasToken) {
        this.#tellTook();
        return this.#tail === undefined ? false : undefined;
      }
      if (tokenIds.length === 0 || this.#early!.isGiven) return undefined;
      const taken = this.#early!.give(event);
      if (finishReason === '' && this.#early!.isGiven && !this.#early!.isOver) this.#tell(tokenIds[0]!);
      return taken;
    };
    try {
      const maxTokens = isAsked ? request.maxTokens : 1;
      const prefillOnly = { blocks, stepBlocks, ...(isAsked && { draws: true }) };
      const asked: GenerateRequest = { ...request, requestId, maxTokens, prefillOnly };
      for (const key of ofTheAnswer) delete asked[key];
      await engines.follow(prefill.number, asked, leg.signal, read);
      return ready < blocks ? 'prefill-short' : undefined;
    } catch (error) {
      if (isStalled) return 'prefill-stalled';
      throw error;
    } finally {
      clearTimeout(stall);
      this.#over.signal.removeEventListener('abort', leave);
    }
  }

  #shareOf({ computes, blocks }: Split, requestId: string, number: number): Share {
    return { requestId: legId(requestId, number), tokensAhead: Math.max(computes, 1), blocks, loadS: 0 };
  }
}

/** Of a leg: workers tell requests apart by it. */
const legId = (requestId: string, number: number): string => `${requestId}-prefill-${number}`;

const refusals: ReadonlySet<string> = new Set(['BUSY', 'TOO_LONG', 'REQUEST']);

const shortfallOf = ({ code, retry }: KvError): Shortfall =>
  refusals.has(code) || (code === 'CANCELLED' && retry) ? 'prefill-refused' : 'prefill-died';

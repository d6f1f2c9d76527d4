/**
 * The load of a worker that only scrapes tell: its own figures are some hundred milliseconds old, and do not say whose requests they
 * count. What this coordinator sent it knows exactly, at every moment; so a scrape is used for the others' requests alone:
 *
 *     others = what the scrape counts − what we had there meanwhile (never below 0)
 *     load   = others, as of the last scrape + ours, as of now
 *
 * Our requests are therefore counted once, whether the pod has seen them or not; when nobody has any, the load is 0.
 *
 * How fast it computes prompts is what its metrics measure (vLLM); of a pod that does not, what our own requests took that had it for
 * themselves; of both the median (`own-rate.ts`), for as long as it is believed (`believed-rate.ts`). Another life of its process
 * measures anew.
 */

import { believedRate } from './believed-rate.ts';
import { noLoad } from './link.ts';
import { OwnRate } from './own-rate.ts';
import type { Scrape } from './scrape.ts';
import type { Share } from './sent-ledger.ts';
import type { Sent, WorkerLoad } from './worker.ts';

interface Own {
  readonly share: Share;
  readonly atMs: number;
  /** Without its first token. */
  waiting: boolean;
  /** The pod's own figures include its blocks. */
  admitted: boolean;
  ended: boolean;
  /** Nobody had anything there when it was sent, nor has since, as far as is known. */
  isAlone: boolean;
}

/** What a scrape says of others stands for so long. */
const maxScrapeAgeMs = 1_000;

/** Of a step's time: so much of what is older is kept at each scrape with something new. */
const keep = 0.8;

export class PodLoad {
  readonly #own = new Set<Own>();
  #running = 0;
  #tokensAhead = 0;
  /** Prompt tokens of our requests, as they are of late: what others' are taken for. */
  #usualTokens = 0;
  #others = { waiting: 0, running: 0 };
  #last: Scrape | undefined;
  #toldAtMs = 0;
  #interval = { count: 0, seconds: 0 };
  #measuredRate = new OwnRate();
  #ownRate = new OwnRate();
  #ratedAtMs = 0;
  readonly #now: () => number;

  constructor(now: () => number = () => performance.now()) {
    this.#now = now;
  }

  /** Ours that have not ended. */
  get open(): number {
    return this.#own.size;
  }

  /** 0: not yet. */
  get prefillTokensPerS(): number {
    return this.#measuredRate.tokensPerS || this.#ownRate.tokensPerS;
  }

  send(share: Share, atMs: number, onEnd: () => void): Sent {
    const isIdle = this.#own.size === 0 && this.#others.waiting + this.#others.running === 0;
    const isAlone = isIdle && this.#toldAtMs > 0 && atMs - this.#toldAtMs < maxScrapeAgeMs;
    const own: Own = { share, atMs, waiting: true, admitted: false, ended: false, isAlone };
    this.#disturb();
    this.#own.add(own);
    this.#tokensAhead += share.tokensAhead;
    this.#usualTokens += (share.tokensAhead - this.#usualTokens) * 0.1;
    const begun = (): void => {
      if (!own.waiting) return;
      own.waiting = false;
      this.#tokensAhead -= share.tokensAhead;
    };
    return {
      firstToken: (isTimed = false) => {
        if (own.ended || !own.waiting) return;
        const nowMs = this.#now();
        const isRated = isTimed && own.isAlone && this.#ownRate.took(share.tokensAhead, (nowMs - atMs) / 1_000);
        if (isRated) this.#ratedAtMs = nowMs;
        begun();
        this.#running++;
      },
      ended: () => {
        if (own.ended) return;
        own.ended = true;
        if (!own.waiting) this.#running--;
        begun();
        this.#own.delete(own);
        if (this.#own.size === 0) this.#tokensAhead = 0; // sums of fractions leave crumbs
        onEnd();
      },
    };
  }

  /** `begunAtMs`: when the scrape was asked for; `openThen`: what `open` was at that moment. */
  scraped(scrape: Scrape, begunAtMs: number, openThen: number, nowMs: number): void {
    const ours = Math.max(openThen, this.#own.size);
    const others = Math.max(0, scrape.waiting + scrape.running - ours);
    const waiting = Math.min(others, Math.max(0, scrape.waiting - (this.#own.size - this.#running)));
    this.#others = { waiting, running: others - waiting };
    if (others > 0) this.#disturb();
    if (scrape.waiting === 0) for (const own of this.#own) own.admitted ||= own.atMs < begunAtMs;
    const last = this.#last;
    if (last !== undefined && last.startedAt === scrape.startedAt) this.#measure(last, scrape, nowMs);
    else if (last !== undefined) this.#forget();
    this.#last = scrape;
    this.#toldAtMs = nowMs;
  }

  #measure(last: Scrape, scrape: Scrape, nowMs: number): void {
    const prompts = Math.max(scrape.prefills - last.prefills, 1); // one, where it does not count them
    const seconds = scrape.prefillS - last.prefillS;
    if (this.#measuredRate.took(scrape.prefillTokens - last.prefillTokens, seconds, prompts)) this.#ratedAtMs = nowMs;
    const [count, intervalS] = [scrape.intervals - last.intervals, scrape.intervalS - last.intervalS];
    if (!(count > 0 && intervalS > 0)) return; // nothing of a counter that went back
    const { count: before, seconds: beforeS } = this.#interval;
    this.#interval = { count: before * keep + count, seconds: beforeS * keep + intervalS };
  }

  /** It was started anew, maybe with other settings. */
  #forget(): void {
    this.#measuredRate = new OwnRate();
    this.#ownRate = new OwnRate();
    this.#interval = { count: 0, seconds: 0 };
  }

  #disturb(): void {
    for (const own of this.#own) own.isAlone = false;
  }

  load(totalBlocks: number, usualPrefillTokensPerS: () => number): WorkerLoad {
    let waitingBlocks = 0;
    for (const own of this.#own) if (own.waiting && !own.admitted) waitingBlocks += own.share.blocks;
    const { waiting, running } = this.#others;
    const { count, seconds } = this.#interval;
    return {
      ...noLoad,
      waiting: waiting + this.#own.size - this.#running,
      running: running + this.#running,
      tokensAhead: Math.round(this.#tokensAhead + waiting * this.#usualTokens),
      usedBlocks: Math.round((this.#last?.usedShare ?? 0) * totalBlocks),
      waitingBlocks,
      prefillTokensPerS: believedRate(this.prefillTokensPerS, usualPrefillTokensPerS, this.#now() - this.#ratedAtMs),
      stepS: count > 0 ? seconds / count : 0,
      toldAtMs: this.#toldAtMs,
    };
  }
}

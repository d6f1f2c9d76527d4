/**
 * The load of a worker that only scrapes tell: its own figures are some hundred milliseconds old, and do not say whose requests they
 * count. What this coordinator sent it knows exactly, at every moment; so a scrape is used for the others' requests alone:
 *
 *     others = what the scrape counts − what we had there meanwhile (never below 0)
 *     load   = others, as of the last scrape + ours, as of now
 *
 * Our requests are therefore counted once, whether the pod has seen them or not; when nobody has any, the load is 0.
 *
 * A request waits until its first token. Of a whole answer that comes with the last one: its prompt would count as work for as long as the
 * answer takes, and a pod that is given many such requests would be closed to others. So one whose first token nobody tells runs once
 *
 *     a scrape that began after it was sent says that nobody waits there, and
 *     the time has passed that its prompt takes behind ours before it, at the pod's rate, since then or since a scrape that said otherwise
 *
 * How fast it computes prompts is what its metrics measure (vLLM); of a pod that does not, what our own requests took that had it for
 * themselves; of both the median (`own-rate.ts`), and no less than what it has computed by the clock (`computed-rate.ts`), for as long as
 * it is believed (`believed-rate.ts`). How long its steps take, and what a request adds to them: `step-line.ts`. Another life of its
 * process measures anew.
 */

import { believedRate } from './believed-rate.ts';
import { ComputedRate } from './computed-rate.ts';
import { noLoad } from './link.ts';
import { OwnRate } from './own-rate.ts';
import type { Scrape } from './scrape.ts';
import type { Share } from './sent-ledger.ts';
import { StepLine } from './step-line.ts';
import type { Sent, WorkerLoad } from './worker.ts';

interface Own {
  readonly share: Share;
  readonly atMs: number;
  /** Of its prompt, if the pod computes ours in their order. */
  leftTokens: number;
  /** Without its first token, as far as is known. */
  waiting: boolean;
  /** Its first token was told. */
  told: boolean;
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
  /** Of these, whose prompts are not computed yet: a load is told at each choice, and most of a busy pod's requests run. */
  readonly #waiting = new Set<Own>();
  #running = 0;
  #tokensAhead = 0;
  /** Prompt tokens of our requests, as they are of late: what others' are taken for. */
  #usualTokens = 0;
  #others = { waiting: 0, running: 0 };
  #last: Scrape | undefined;
  #toldAtMs = 0;
  /** `requests`: those that ran, of each interval. */
  #interval = { count: 0, seconds: 0, requests: 0 };
  #stepLine = new StepLine();
  #stepPerRequestS = 0;
  #measuredRate = new OwnRate();
  #ownRate = new OwnRate();
  #computedRate = new ComputedRate();
  #ratedAtMs = 0;
  /** Its rate as it was told last, and until when its prompts count as computed at such a rate. */
  #tokensPerS = 0;
  #computedAtMs = 0;
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
    const rate = this.#measuredRate.tokensPerS || this.#ownRate.tokensPerS;
    return rate > 0 ? Math.max(rate, this.#computedRate.tokensPerS) : 0;
  }

  /** Of this life of its process. */
  get stepLine(): StepLine {
    return this.#stepLine;
  }

  send(share: Share, atMs: number, onEnd: () => void): Sent {
    const isIdle = this.#own.size === 0 && this.#others.waiting + this.#others.running === 0;
    const isAlone = isIdle && this.#toldAtMs > 0 && atMs - this.#toldAtMs < maxScrapeAgeMs;
    const own: Own = {
      ...{ share, atMs, leftTokens: share.tokensAhead },
      ...{ waiting: true, told: false, admitted: false, ended: false, isAlone },
    };
    this.#disturb();
    this.#compute(atMs); // what has passed is not this one's
    this.#own.add(own);
    this.#waiting.add(own);
    this.#tokensAhead += share.tokensAhead;
    this.#usualTokens += (share.tokensAhead - this.#usualTokens) * 0.1;
    return {
      firstToken: (isTimed = false) => {
        if (own.ended || own.told) return;
        own.told = true;
        const nowMs = this.#now();
        const isRated = isTimed && own.isAlone && this.#ownRate.took(share.tokensAhead, (nowMs - atMs) / 1_000);
        if (isRated) this.#ratedAtMs = nowMs;
        this.#compute(nowMs);
        this.#begin(own);
      },
      ended: () => {
        if (own.ended) return;
        own.ended = true;
        this.#begin(own);
        this.#running--;
        this.#own.delete(own);
        if (this.#own.size === 0) this.#tokensAhead = 0; // sums of fractions leave crumbs
        onEnd();
      },
    };
  }

  #begin(own: Own): void {
    if (!own.waiting) return;
    own.waiting = false;
    this.#waiting.delete(own);
    this.#tokensAhead -= own.share.tokensAhead;
    this.#running++;
  }

  /** Until now the pod has computed ours, one after another; time in which it had none is no help for the next. */
  #compute(nowMs: number): void {
    let tokens = (Math.max(nowMs - this.#computedAtMs, 0) / 1_000) * this.#tokensPerS;
    this.#computedAtMs = Math.max(nowMs, this.#computedAtMs);
    for (const own of this.#waiting) {
      const computed = Math.min(own.leftTokens, tokens);
      own.leftTokens -= computed;
      tokens -= computed;
      if (own.leftTokens === 0 && own.admitted && !own.share.tellsFirstToken) this.#begin(own);
    }
  }

  /** `begunAtMs`: when the scrape was asked for; `openThen`: what `open` was at that moment. */
  scraped(scrape: Scrape, begunAtMs: number, openThen: number, nowMs: number): void {
    const ours = Math.max(openThen, this.#own.size);
    const others = Math.max(0, scrape.waiting + scrape.running - ours);
    const waiting = Math.min(others, Math.max(0, scrape.waiting - (this.#own.size - this.#running)));
    this.#others = { waiting, running: others - waiting };
    if (others > 0) this.#disturb();
    this.#compute(nowMs);
    for (const own of this.#own) {
      if (own.admitted || own.atMs >= begunAtMs) continue;
      if (scrape.waiting === 0) own.admitted = true;
      else own.leftTokens = own.share.tokensAhead; // it may be one of those that wait
    }
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
    const isIdle = [last, scrape].every(({ waiting, running }) => waiting + running === 0);
    this.#computedRate.took(scrape.computedTokens - last.computedTokens, (nowMs - this.#toldAtMs) / 1_000, isIdle);
    const [count, intervalS] = [scrape.intervals - last.intervals, scrape.intervalS - last.intervalS];
    if (!(count > 0 && intervalS > 0)) return; // nothing of a counter that went back
    const running = Math.max((last.running + scrape.running) / 2, 1);
    this.#stepLine.add(running, intervalS / count);
    const { count: before, seconds: beforeS, requests } = this.#interval;
    this.#interval = {
      count: before * keep + count,
      seconds: beforeS * keep + intervalS,
      requests: requests * keep + running * count,
    };
  }

  /** It was started anew, maybe with other settings. */
  #forget(): void {
    this.#measuredRate = new OwnRate();
    this.#ownRate = new OwnRate();
    this.#computedRate = new ComputedRate();
    this.#interval = { count: 0, seconds: 0, requests: 0 };
    this.#stepLine = new StepLine();
    this.#stepPerRequestS = 0;
  }

  #disturb(): void {
    for (const own of this.#own) own.isAlone = false;
  }

  /** `stepPerRequestS`: of all pods of its model; 0: nobody knows. */
  load(
    totalBlocks: number,
    usualPrefillTokensPerS: () => number,
    stepPerRequestS = (): number => this.#stepLine.slope,
  ): WorkerLoad {
    const nowMs = this.#now();
    this.#tokensPerS = believedRate(this.prefillTokensPerS, usualPrefillTokensPerS, nowMs - this.#ratedAtMs);
    this.#compute(nowMs);
    let waitingBlocks = 0;
    for (const own of this.#waiting) if (!own.admitted) waitingBlocks += own.share.blocks;
    const { waiting, running } = this.#others;
    return {
      ...noLoad,
      waiting: waiting + this.#own.size - this.#running,
      running: running + this.#running,
      tokensAhead: Math.round(this.#tokensAhead + waiting * this.#usualTokens),
      usedBlocks: Math.round((this.#last?.usedShare ?? 0) * totalBlocks),
      waitingBlocks,
      prefillTokensPerS: this.#tokensPerS,
      ...this.#steps(stepPerRequestS()),
      toldAtMs: this.#toldAtMs,
    };
  }

  /** A request adds as much as at the others of its model, and as it was known last; the rest is this pod's own. */
  #steps(perRequestS: number): Pick<WorkerLoad, 'stepS' | 'stepPerRequestS'> {
    const { count, seconds, requests } = this.#interval;
    if (perRequestS > 0) this.#stepPerRequestS = perRequestS;
    if (count === 0) return { stepS: 0, stepPerRequestS: 0 };
    const meanS = seconds / count;
    const stepPerRequestS = Math.min(this.#stepPerRequestS, seconds / requests);
    return { stepS: Math.max(meanS - (stepPerRequestS * requests) / count, 0), stepPerRequestS };
  }
}

/**
 * What an engine has to do, and how fast it does it, for whoever chooses among engines. Kept up to date with every change of a
 * request and every step in O(1), without an array or an object for it; figures are put together when somebody asks.
 *
 * Invariants: each count is the sum over the requests in the engine (`settle` replaces what a request had added before), so that
 * an engine without requests has 0 of everything; a rate that nothing has measured is 0.
 */
import { invariant } from '@kvtier/errors';
import type { EngineRequest } from './request.ts';

/** Of one moment. Seconds, tokens and blocks; 0 for a rate: not measured yet. */
export interface EngineLoadFigures {
  /** Requests without their first token, and those that have it and go on. */
  readonly waiting: number;
  readonly running: number;
  /**
   * Tokens to be computed before all requests here get their next token by decoding: of prompts, and of answers that were
   * preempted. Hits, what is being loaded and what another worker computes are not among them; of a request deep in the queue hits are not known yet.
   */
  readonly tokensAhead: number;
  /** Of these, those that the step computes which runs, and for how many seconds it has run; 0, 0: none of them is computed now. */
  readonly stepTokens: number;
  readonly stepForS: number;
  /** KV blocks that something holds, pinned ones included, of all that there are. */
  readonly usedBlocks: number;
  readonly totalBlocks: number;
  /** Blocks that requests which hold none yet need to be let in, in all attention groups: what their tokens take that are there already. */
  readonly waitingBlocks: number;
  readonly loadAheadS: number;
  readonly prefillTokensPerS: number;
  /** A step that only decodes takes stepS + stepPerRequestS × its requests. */
  readonly stepS: number;
  readonly stepPerRequestS: number;
  /** A step that computes prompts alone takes so long besides its tokens. */
  readonly prefillStepS: number;
  /** Of what decoding leaves of a target between tokens, the share that prompts get (pacing.ts). */
  readonly pacingTrust: number;
  /** Given back by requests that ended, while the engine computed. */
  readonly freedBlocksPerS: number;
  /** By tier, as loads went; what was rather computed counts as it was expected to go. */
  readonly loadBlocksPerS: Readonly<Record<string, number>>;
}

/** Seconds of measuring after which a measurement counts 1/e. */
const memoryS = 10;
/** What one more step leaves of the steps before, for the line through decode steps. */
const stepKeep = 0.99;
/** Of a step that computes prompts: what it costs besides its tokens at least. */
const leastStart = 1 / 32;
const maxTiers = 16;
/** What was rather computed counts as so long a load at most: how long it would have taken was only expected. */
const mostExpectedS = 1;
/**
 * A step of more than a second whose prompts took so many times as long as they should was disturbed: the process stood still, the machine
 * was moved, a kernel was loaded. One second of it counts, with its share of the tokens, and so much of a first one, of which nobody knows:
 * half a minute would leave nothing of what is remembered. When the step before was disturbed, too, the machine is another now, and all
 * of it counts.
 */
const disturbed = 4;
const mostDisturbedS = 1;
/** Of loads: what takes less is worth no word. */
const leastDisturbedS = 0.05;

/** An amount over a time, recent ones more than old ones; time runs only while something is measured. */
class Rate {
  #amount = 0;
  #seconds = 0;

  add(amount: number, seconds: number): void {
    const keep = Math.exp(-seconds / memoryS);
    this.#amount = this.#amount * keep + amount;
    this.#seconds = this.#seconds * keep + seconds;
  }

  /** In no time of its own. */
  addAmount(amount: number): void {
    this.#amount += amount;
  }

  get perS(): number {
    return this.#seconds > 0 ? this.#amount / this.#seconds : 0;
  }
}

/** The line through (requests, or tokens, and seconds) of steps of one kind, by least squares, old steps forgotten. */
class StepLine {
  #weight = 0;
  #n = 0;
  #nn = 0;
  #y = 0;
  #ny = 0;

  add(requests: number, seconds: number): void {
    this.#weight = this.#weight * stepKeep + 1;
    this.#n = this.#n * stepKeep + requests;
    this.#nn = this.#nn * stepKeep + requests * requests;
    this.#y = this.#y * stepKeep + seconds;
    this.#ny = this.#ny * stepKeep + requests * seconds;
  }

  /** Seconds that a request adds; 0 while all steps had about as many. */
  get slope(): number {
    const spread = this.#weight * this.#nn - this.#n * this.#n;
    // Less than a hundredth of a request on average: rounding, not a line.
    if (spread <= this.#weight * this.#weight * 1e-4) return 0;
    const slope = (this.#weight * this.#ny - this.#n * this.#y) / spread;
    return Math.min(Math.max(0, slope), this.#n > 0 ? this.#y / this.#n : 0);
  }

  /** Seconds of a step in the middle. */
  get mean(): number {
    return this.#weight > 0 ? this.#y / this.#weight : 0;
  }

  /** Seconds that a step takes without any request. */
  get start(): number {
    return this.#weight > 0 ? Math.max(0, (this.#y - this.slope * this.#n) / this.#weight) : 0;
  }
}

export class EngineLoad {
  readonly #blockTokens: number;
  readonly #mostBlocks: (tokens: number) => number;
  readonly #maxStepTokens: number;
  #waiting = 0;
  #running = 0;
  #tokensAhead = 0;
  #waitingBlocks = 0;
  #stepTokens = 0;
  #stepBegunUs = 0;
  readonly #prefill = new Rate();
  readonly #freed = new Rate();
  readonly #line = new StepLine();
  readonly #promptLine = new StepLine();
  readonly #loads = new Rate();
  readonly #byTier = new Map<string, Rate>();
  #pacingTrust = 0;
  /** So was the last step that computed prompts. */
  #wasDisturbed = false;
  /** Of tiers whose last load was disturbed: when that ended. */
  readonly #disturbedUs = new Map<string, number>();

  /** @param mostBlocks that a sequence of so many tokens holds at any one time; default: one per block of tokens */
  constructor(
    blockTokens: number,
    mostBlocks = (tokens: number): number => Math.ceil(tokens / blockTokens),
    maxStepTokens = Number.POSITIVE_INFINITY,
  ) {
    this.#blockTokens = blockTokens;
    this.#mostBlocks = mostBlocks;
    this.#maxStepTokens = maxStepTokens;
  }

  /** Blocks that a sequence of so many tokens holds, in all attention groups. */
  blocksOf(tokens: number): number {
    return this.#mostBlocks(tokens);
  }

  /** Something about this request has changed: what it adds is counted anew. */
  settle(request: EngineRequest): void {
    const { counted, state } = request;
    const isOpen = state !== 'finished';
    const begun = request.firstOutputDone;
    const waiting = isOpen && !begun ? 1 : 0;
    const running = isOpen && begun ? 1 : 0;
    const ahead = isOpen ? aheadOf(request) : 0;
    const needsBlocks = isOpen && !request.holdsBlocks && state === 'waiting';
    // As admission asks for it (`fullSequenceMustFit`). Of an answer to come only the most is known: one that may be as long as the model
    // allows would claim the whole pool, and keep everybody else from it.
    const blocks = needsBlocks ? this.#mostBlocks(request.tokenCount) : 0;
    this.#waiting += waiting - counted.waiting;
    this.#running += running - counted.running;
    this.#tokensAhead += ahead - counted.ahead;
    this.#waitingBlocks += blocks - counted.blocks;
    counted.waiting = waiting;
    counted.running = running;
    counted.ahead = ahead;
    counted.blocks = blocks;
  }

  /** A step begins that computes so many of the tokens ahead. */
  begun(tokens: number, nowUs: number): void {
    this.#stepTokens = tokens;
    this.#stepBegunUs = nowUs;
  }

  /** It is over, however it went. */
  over(): void {
    this.#stepTokens = 0;
  }

  /**
   * A step has ended: prompt tokens computed, requests that decoded, seconds from its start to its end. `mostLeft`: of the prompt that had
   * most to be computed still when it began; default: all of these tokens were one prompt's, and its last ones.
   */
  step(prefillTokens: number, decodes: number, seconds: number, mostLeft = prefillTokens): void {
    if (!(seconds > 0)) return;
    this.#freed.add(0, seconds);
    if (prefillTokens === 0) {
      this.#line.add(decodes, seconds);
      return;
    }
    // What decoding alone would have taken is not the prompt's; of one step it is never nearly all.
    const decoding = decodes === 0 ? 0 : this.decodingS(decodes);
    // What a hit or a hand-off leaves to be computed takes what any step takes, and says nothing of a prompt: an engine that has only served
    // hits since it started would count as a hundred times slower than it is, and never get the prompt that it could learn from. Beside
    // streams the time of several is no more than what their step took longer by chance, and a long prompt that gets a block of each step
    // counts; alone such a step takes what any step takes, too, and counts where no step has more.
    const mayHaveMore = decodes === 0 && this.#maxStepTokens > this.#blockTokens;
    const isTail = (mayHaveMore ? prefillTokens : mostLeft) <= this.#blockTokens;
    const promptS = Math.max(seconds - decoding, seconds / 4);
    const share = isTail ? 1 : this.#shareOf(prefillTokens, promptS);
    if (decodes === 0 && share === 1) this.#promptLine.add(prefillTokens, seconds);
    if (!isTail) this.#prefill.add(prefillTokens * share, promptS * share);
  }

  /** How much of a step counts that took so long over so many prompt tokens. */
  #shareOf(tokens: number, seconds: number): number {
    if (seconds <= mostDisturbedS) {
      this.#wasDisturbed = false;
      return 1;
    }
    const { perS } = this.#prefill;
    const isDisturbed = perS > 0 && seconds * perS > disturbed * tokens;
    const isAgain = isDisturbed && this.#wasDisturbed;
    this.#wasDisturbed = isDisturbed;
    return (isDisturbed && !isAgain) || perS === 0 ? mostDisturbedS / seconds : 1;
  }

  /** Prompts get such a share from now on. */
  paced(trust: number): void {
    this.#pacingTrust = trust;
  }

  /** Of a step in which so many requests decode, and nothing else is done; 0: not measured. */
  decodingS(requests: number): number {
    return this.#line.start + this.#line.slope * requests;
  }

  /**
   * Of a step that computes prompts alone, besides its tokens; 0: not measured. The line of a machine that others use, too, may begin at
   * nothing; that steps are free, which it says then, is never true.
   */
  get prefillStepS(): number {
    const { slope, start, mean } = this.#promptLine;
    return slope > 0 ? Math.max(start, mean * leastStart) : 0;
  }

  get prefillTokensPerS(): number {
    return this.#prefill.perS;
  }

  /** A request ended, and so many blocks are free again. */
  freed(blocks: number): void {
    this.#freed.addAmount(blocks);
  }

  /**
   * A load ended: blocks by tier, and how long it took. One that took far longer than was expected was disturbed, and counts for no more
   * than so many times as long: routers would take all that is held here for worth nothing. Others that were under way with it do not count;
   * when one that began later takes as long, it is no accident.
   */
  loaded(byTier: Readonly<Record<string, number>>, tookS: number, nowUs: number): void {
    const tiers = Object.keys(byTier).filter((tier) => byTier[tier]! > 0);
    if (tiers.length === 0) return; // nothing came: how long that took says nothing
    const isKnown = tiers.every((tier) => (this.#byTier.get(tier)?.perS ?? 0) > 0);
    const mostS = isKnown ? Math.max(disturbed * this.#expectedS(byTier), leastDisturbedS) : Number.POSITIVE_INFINITY;
    if (tookS <= mostS) {
      for (const tier of tiers) this.#disturbedUs.delete(tier);
      this.#count(byTier, tookS);
      return;
    }
    const before = tiers.flatMap((tier) => this.#disturbedUs.get(tier) ?? []);
    const isAgain = before.some((us) => nowUs - tookS * 1e6 >= us);
    if (before.length > 0 && !isAgain) return;
    if (!isAgain) for (const tier of tiers) this.#disturbedUs.set(tier, nowUs); // all are known, and so they are few
    this.#count(byTier, isAgain ? tookS : mostS);
  }

  #count(byTier: Readonly<Record<string, number>>, seconds: number): void {
    const total = this.#took(byTier, 1, seconds);
    if (total > 0) this.#loads.add(total, seconds);
  }

  /**
   * Blocks that a tier holds were rather computed: that load would have taken so long. Whoever chooses among engines would otherwise
   * never learn that this one does not load them.
   */
  passed(byTier: Readonly<Record<string, number>>, seconds: number): void {
    const share = Math.min(1, mostExpectedS / seconds);
    this.#took(byTier, share, seconds * share);
  }

  /** `share` of the blocks, in this time. Returns how many. */
  #took(byTier: Readonly<Record<string, number>>, share: number, seconds: number): number {
    let total = 0;
    for (const tier in byTier) total += byTier[tier]! * share;
    if (!(total > 0 && seconds > 0)) return 0;
    const expected = share * this.#expectedS(byTier);
    // Of several tiers each took the share that it usually takes.
    const stretch = seconds / expected;
    for (const tier in byTier) {
      const blocks = byTier[tier]! * share;
      const tookS = blocks * this.#secondsOf(tier) * stretch;
      let rate = this.#byTier.get(tier);
      if (!rate && this.#byTier.size < maxTiers) {
        rate = new Rate();
        this.#byTier.set(tier, rate);
      }
      if (blocks > 0) rate?.add(blocks, tookS);
    }
    return total;
  }

  figures(usedBlocks: number, totalBlocks: number, loadingBlocks: number, nowUs: number): EngineLoadFigures {
    // Of an aborted request nothing is ahead, though the step goes on.
    const stepTokens = Math.min(this.#stepTokens, this.#tokensAhead);
    const loadBlocksPerS: Record<string, number> = {};
    for (const [tier, rate] of this.#byTier) loadBlocksPerS[tier] = rate.perS;
    const loads = this.#loads.perS;
    return {
      waiting: this.#waiting,
      running: this.#running,
      tokensAhead: this.#tokensAhead,
      stepTokens,
      stepForS: stepTokens === 0 ? 0 : Math.max(0, nowUs - this.#stepBegunUs) / 1e6,
      usedBlocks,
      totalBlocks,
      waitingBlocks: this.#waitingBlocks,
      loadAheadS: loads > 0 ? loadingBlocks / loads : 0,
      prefillTokensPerS: this.#prefill.perS,
      stepS: this.#line.start,
      stepPerRequestS: this.#line.slope,
      prefillStepS: this.prefillStepS,
      pacingTrust: this.#pacingTrust,
      freedBlocksPerS: this.#freed.perS,
      loadBlocksPerS,
    };
  }

  /** The counts are those of these requests, each as it is now. For tests. */
  check(requests: Iterable<EngineRequest>): void {
    let [waiting, running, ahead, blocks] = [0, 0, 0, 0];
    for (const request of requests) {
      const before = { ...request.counted };
      this.settle(request);
      const { counted, id } = request;
      const same =
        counted.waiting === before.waiting &&
        counted.running === before.running &&
        counted.ahead === before.ahead &&
        counted.blocks === before.blocks;
      invariant(
        same,
        () => `request ${id}: counts ${JSON.stringify(before)} in the load, is ${JSON.stringify(counted)}`,
      );
      waiting += counted.waiting;
      running += counted.running;
      ahead += counted.ahead;
      blocks += counted.blocks;
    }
    invariant(
      waiting === this.#waiting &&
        running === this.#running &&
        ahead === this.#tokensAhead &&
        blocks === this.#waitingBlocks,
      'the load counts requests that are gone',
    );
  }

  /** How long so many blocks of each tier usually take. */
  #expectedS(byTier: Readonly<Record<string, number>>): number {
    let seconds = 0;
    for (const tier in byTier) seconds += byTier[tier]! * this.#secondsOf(tier);
    return seconds;
  }

  /** A block from this tier, or 1 while that is not known: then none is. */
  #secondsOf(tier: string): number {
    const perS = this.#byTier.get(tier)?.perS ?? 0;
    const all = this.#loads.perS;
    return perS > 0 ? 1 / perS : all > 0 ? 1 / all : 1;
  }
}

/** A request that decodes has one token that is not computed yet: its next step's, and nobody waits for it. */
function aheadOf(request: EngineRequest): number {
  const { state, tokenCount, computedTokens, expectedTokens } = request;
  if (state === 'storing') return 0;
  if (state === 'running') {
    // Behind all that comes from both ends the last token is computed at least.
    if (request.head) return Math.max(1, tokenCount - computedTokens - request.head.awaitedTokens);
    const left = tokenCount - computedTokens;
    return request.firstOutputDone && left <= 1 ? 0 : left;
  }
  // At least the last token is computed, for its logits.
  return Math.max(1, tokenCount - Math.max(computedTokens, expectedTokens));
}

/**
 * How much of a prompt goes into a step that streams wait for. A stream that says what may be between two of its tokens gets a step of
 * that length: what its decoding leaves of it is the prompts'.
 *
 *     tokens = trust × max(target - step of so many streams, target ÷ 4) × prefill rate        at least one block
 *     trust  = (target ÷ times - step of so many streams) ÷ the same max                        at most 0.9
 *
 * Rates are means: a chunk far down a prompt takes longer than one at its start, and a machine that is busy longer than an idle one. All
 * streams wait for the same step, and each for every step of its answer: one of a hundred that is late makes all of them late. So `times` is
 * how many times as long as predicted a step may take: the mean of those before, and four times their spread. It costs prompts little, since
 * a step of three quarters of the target computes them nearly as fast as one that fills it.
 *
 * A prompt gets an eighth of the target whatever the streams take and however steps scatter, so that it ends. Where decoding alone takes
 * longer than the target, prompts are not what is too slow, and nothing is held back; nor is it while no rate is known.
 */
import type { Share } from './batch.ts';
import type { EngineLoad } from './engine-load.ts';

/** Of what is left of the target. */
const mostTrust = 0.9;
/** Of the target, what counts as left at least; and what a prompt gets at least. */
const [leastLeft, leastShare] = [1 / 4, 1 / 8];
/** Of the tokens that it may have: a step with fewer says little. */
const full = 3 / 4;

export class Pace {
  /** Before anything was paced: about what a few streams leave. */
  #trust = 0.7;
  readonly #times = new Times();
  /** Of the step that was put together last; infinite: nobody asked for anything. */
  #tokens = Number.POSITIVE_INFINITY;
  #decodingS = 0;
  #perS = 0;

  /** Of what is left of a target, the share that prompts got last. */
  get trust(): number {
    return this.#trust;
  }

  /** Prompt tokens that the step may have beside what decodes in it already. */
  promptTokens(decoding: readonly Share[], load: EngineLoad, blockTokens: number): number {
    let betweenMs = Number.POSITIVE_INFINITY;
    for (const { request } of decoding) {
      const target = request.params.betweenMs ?? 0;
      if (target > 0 && target < betweenMs) betweenMs = target;
    }
    this.#tokens = this.#allowed(decoding.length, betweenMs / 1000, load, blockTokens);
    return this.#tokens;
  }

  #allowed(decodes: number, targetS: number, load: EngineLoad, blockTokens: number): number {
    this.#perS = load.prefillTokensPerS;
    this.#decodingS = load.decodingS(decodes);
    if (!Number.isFinite(targetS) || this.#perS === 0 || this.#decodingS >= targetS) return Number.POSITIVE_INFINITY;
    const leftS = Math.max(targetS - this.#decodingS, targetS * leastLeft);
    const promptS = Math.max(targetS / this.#times.most - this.#decodingS, targetS * leastShare);
    this.#trust = Math.min(promptS / leftS, mostTrust);
    return Math.max(Math.floor(this.#trust * leftS * this.#perS), blockTokens);
  }

  /** That step has ended, with so many prompt tokens. */
  ended(promptTokens: number, seconds: number): void {
    if (!Number.isFinite(this.#tokens) || promptTokens < full * this.#tokens) return;
    this.#times.took(seconds / (this.#decodingS + promptTokens / this.#perS));
  }
}

/** Steps before any was seen count as so many, so far from what is predicted. */
const [firstSteps, firstSpread] = [20, 0.04];
/** What one more step leaves of those before. */
const keep = 0.995;
/** Of one that took longer the machine stood still. */
const mostTimes = 2;
const spreads = 4;

/** How many times as long as predicted steps take: mean and spread, old ones forgotten. */
class Times {
  #count = firstSteps;
  #sum = firstSteps;
  #squares = firstSteps * (1 + firstSpread ** 2);

  /** As many as hardly one of them takes. */
  get most(): number {
    const mean = this.#sum / this.#count;
    return mean + spreads * Math.sqrt(Math.max(this.#squares / this.#count - mean * mean, 0));
  }

  took(times: number): void {
    const counted = Math.min(times, mostTimes);
    this.#count = this.#count * keep + 1;
    this.#sum = this.#sum * keep + counted;
    this.#squares = this.#squares * keep + counted * counted;
  }
}

/**
 * How long this engine computes, learned from its own steps: a step over n tokens that look at p positions together takes
 *
 *     fixed + perToken × n + perPosition × p
 *
 * because products of weights cost every token the same, and attention costs what a token looks at. A rate alone would be wrong by the
 * half for a prompt that is much longer, or shorter, than those seen last; and a step over the one token that an import leaves is
 * nearly all `fixed`, and says nothing of the others. Weighted least squares over steps that fade; nothing below zero.
 */
import { FadingRate } from './fading-rate.ts';

/** A step of fewer tokens says only what a step costs by itself. */
const leastTokens = 64;
/** Of what is remembered at each new step. */
const keep = 0.93;
/** Where steps all have about the same positions a token, the two costs cannot be told apart. */
const leastSpread = 0.01;

/** Classes of how far back tokens look: each twice as far as the one before. */
export const reaches = 32;
/** Of so many positions a token. */
export const reachOf = (positions: number): number =>
  Math.min(reaches - 1, Math.floor(Math.log2(Math.max(1, positions))));

export class ComputeModel {
  readonly #small = new FadingRate(0.8);
  #steps = 0;
  readonly #stepsOf = new Float64Array(reaches);
  #fixedUs = 0;
  /** Sums over steps, each weighted by 1 ÷ tokens: n·n, n·p, p·p, n·us, p·us. */
  #nn = 0;
  #np = 0;
  #pp = 0;
  #ny = 0;
  #py = 0;
  #perTokenUs = 0;
  #perPositionUs = 0;

  /** Steps that computed enough at once to tell how long more would take. */
  get steps(): number {
    return this.#steps;
  }

  /** Of these, those whose tokens looked about as far back (`reachOf`). */
  stepsOf(reach: number): number {
    return this.#stepsOf[reach]!;
  }

  /** A step computed `tokens` tokens, which looked at `positions` positions together, itself included each. */
  observe(tokens: number, positions: number, elapsedUs: number): void {
    if (!(tokens > 0) || !(positions > 0) || !(elapsedUs >= 0) || !Number.isFinite(tokens + positions + elapsedUs))
      return;
    if (tokens < leastTokens) {
      this.#small.observe(tokens, elapsedUs);
      const ownUs = Math.max(0, elapsedUs - this.#perTokenUs * tokens - this.#perPositionUs * positions);
      if (this.#steps > 0) this.#fixedUs += 0.2 * (Math.min(ownUs, elapsedUs) - this.#fixedUs);
      return;
    }
    this.#steps++;
    this.#stepsOf[reachOf(positions / tokens)]!++;
    // What a step costs by itself is little of a large one; half of it at most, should small ones have been slow for a while.
    const us = Math.max(elapsedUs / 2, elapsedUs - this.#fixedUs);
    this.#nn = this.#nn * keep + tokens;
    this.#np = this.#np * keep + positions;
    this.#pp = this.#pp * keep + (positions / tokens) * positions;
    this.#ny = this.#ny * keep + us;
    this.#py = this.#py * keep + (positions / tokens) * us;
    this.#solve();
  }

  /** Time to compute tokens `from` to `to` of a prompt; undefined before the first step. */
  us(from: number, to: number): number | undefined {
    const tokens = Math.max(0, to - from);
    if (this.#steps === 0) {
      const rate = this.#small.usPerUnit;
      return rate === undefined ? undefined : rate * tokens;
    }
    return this.#perTokenUs * tokens + this.#perPositionUs * positionsOf(from, to);
  }

  #solve(): void {
    const [nn, np, pp, ny, py] = [this.#nn, this.#np, this.#pp, this.#ny, this.#py];
    const spread = nn * pp - np * np;
    const perToken = (ny * pp - py * np) / spread;
    const perPosition = (py * nn - ny * np) / spread;
    if (spread < leastSpread * nn * pp || !(perPosition > 0)) {
      this.#perTokenUs = ny / nn;
      this.#perPositionUs = 0;
    } else if (perToken > 0) {
      this.#perTokenUs = perToken;
      this.#perPositionUs = perPosition;
    } else {
      this.#perTokenUs = 0;
      this.#perPositionUs = py / pp;
    }
  }
}

/** What tokens `from` to `to` of a prompt look at: token i at i + 1 positions. */
export const positionsOf = (from: number, to: number): number => (Math.max(0, to - from) * (from + to + 1)) / 2;

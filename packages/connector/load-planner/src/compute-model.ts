/**
 * How long this engine computes, learned from its own steps: a step over n tokens, of which the last looks back c positions and all
 * together at p, takes
 *
 *     base + perContext × c  +  perToken × n + perPosition × p
 *     what a step costs itself   what its tokens cost
 *
 * because products of weights cost every token the same, and attention costs what a token looks at. A rate alone would be wrong by the
 * half for a prompt that is much longer, or shorter, than those seen last. A step over the one token that an import leaves tells what a
 * step costs itself: weights and the keys and values before it are read once, however many tokens use them. That is left out of what
 * tokens cost and comes back with every step that a prompt would take. Seen on two cores at 3,840 tokens in 8 steps of 18 ms: without
 * it computing was taken for 7 % faster than it is, and the 2.5 ms of the step behind an import were not seen at all.
 *
 * Weighted least squares over steps that fade; nothing below zero. Invariant: of steps that are alike the model says what they took,
 * whatever is thought of the step itself; that only decides how the same tokens would do in other steps.
 */
import { FadingLine, type Line, lineOf } from './fading-line.ts';
import { FadingRate } from './fading-rate.ts';

/** A step of fewer tokens says only what a step costs by itself. */
export const leastTokens = 64;
/** Of what is remembered at each new step. */
const keep = 0.93;
const keepOwn = 0.9;
/**
 * A step that takes so much longer than was thought was disturbed, and no more of it is believed. When the one before took longer, too,
 * the machine is another now, and what was seen before counts for little; likewise when two are faster. A small step is disturbed by
 * more, and the first ones are slow on any machine: they count for little, and a single faster one is enough.
 */
const surprising = { own: 2, tokens: 1.4 };
const afterSurprise = 0.3;
/** Of a large step, what it costs itself is no more than this, should small ones have been slow for a while. */
const mostOwn = 7 / 8;
/** A prompt is cut into steps as large as the largest of late: of the last so many to twice as many. */
const lateSteps = 32;

/** Classes of how far back tokens look: each twice as far as the one before. */
export const reaches = 32;
/** Of so many positions a token. */
export const reachOf = (positions: number): number =>
  Math.min(reaches - 1, Math.floor(Math.log2(Math.max(1, positions))));

/** Over large steps, weighted by 1 ÷ tokens: of tokens and positions (n·n, n·p, p·p), with time, with 1, with the last position. */
interface Sums {
  nn: number;
  np: number;
  pp: number;
  ny: number;
  py: number;
  n1: number;
  p1: number;
  nc: number;
  pc: number;
}

export class ComputeModel {
  readonly #small = new FadingRate(0.8);
  /** What steps cost themselves, by the last position. */
  readonly #own = new FadingLine(keepOwn);
  /** The step before took longer (1), or was faster (-1). */
  readonly #surprise = { own: 0, tokens: 0 };
  #steps = 0;
  readonly #stepsOf = new Float64Array(reaches);
  /** Tokens of the largest step, now and in the time before. */
  readonly #largest = { now: 0, before: 0 };
  readonly #sums: Sums = { nn: 0, np: 0, pp: 0, ny: 0, py: 0, n1: 0, p1: 0, nc: 0, pc: 0 };
  #tokens: Line = { base: 0, slope: 0 };
  #step: Line = { base: 0, slope: 0 };

  /** Steps that computed enough at once to tell how long more would take. */
  get steps(): number {
    return this.#steps;
  }

  /** Tokens of a step as large as a prompt is cut into; 0 before the first one. */
  get stepTokens(): number {
    return Math.max(this.#largest.now, this.#largest.before);
  }

  /** Of these, those whose tokens looked about as far back (`reachOf`). */
  stepsOf(reach: number): number {
    return this.#stepsOf[reach]!;
  }

  /** A step computed `tokens` tokens, which looked at `positions` positions together, itself included each. */
  observe(tokens: number, positions: number, elapsedUs: number): void {
    if (!(tokens > 0) || !(positions > 0) || !(elapsedUs >= 0) || !Number.isFinite(tokens + positions + elapsedUs))
      return;
    const context = positions / tokens + (tokens - 1) / 2;
    if (tokens < leastTokens) this.#observeOwn(tokens, positions, context, elapsedUs);
    else this.#observeTokens(tokens, positions, context, elapsedUs);
    this.#solve();
  }

  /** Time to compute tokens `from` to `to` of a prompt, in steps as large as those seen; undefined before the first step. */
  us(from: number, to: number): number | undefined {
    const tokens = Math.max(0, to - from);
    if (this.#steps === 0) {
      const rate = this.#small.usPerUnit;
      return rate === undefined ? undefined : rate * tokens;
    }
    const { stepTokens } = this;
    const full = Math.floor(tokens / stepTokens);
    const steps = Math.ceil(tokens / stepTokens);
    // The full ones end one behind the other, and what is left at `to`.
    const contexts = full * from + (stepTokens * full * (full + 1)) / 2 + (steps - full) * to;
    const ownUs = this.#step.base * steps + this.#step.slope * contexts;
    return ownUs + this.#tokens.base * tokens + this.#tokens.slope * positionsOf(from, to);
  }

  /** Time of a step over next to nothing behind `context` tokens; 0 before the first one. */
  stepUs(context: number): number {
    return this.#own.line.base + this.#own.line.slope * context;
  }

  #observeOwn(tokens: number, positions: number, context: number, elapsedUs: number): void {
    this.#small.observe(tokens, elapsedUs);
    const ownUs = Math.max(0, elapsedUs - this.#tokens.base * tokens - this.#tokens.slope * positions);
    const thoughtUs = this.stepUs(context);
    this.#own.observe(context, this.#believed('own', ownUs, thoughtUs));
    if (thoughtUs === 0) this.#own.fade(afterSurprise);
  }

  #observeTokens(tokens: number, positions: number, context: number, elapsedUs: number): void {
    const reach = positions / tokens;
    // Nothing is thought of steps that look back further than any so far.
    const isSeen = this.#stepsOf[reachOf(reach)]! > 0;
    const us = this.#believed('tokens', elapsedUs, isSeen ? this.us(context - tokens, context)! : 0);
    this.#steps++;
    this.#stepsOf[reachOf(reach)]!++;
    const largest = this.#largest;
    if (this.#steps % lateSteps === 0) {
      largest.before = largest.now;
      largest.now = 0;
    }
    largest.now = Math.max(tokens, largest.now);
    this.#fade('tokens', keep);
    const sums = this.#sums;
    sums.nn += tokens;
    sums.np += positions;
    sums.pp += reach * positions;
    sums.ny += us;
    sums.py += reach * us;
    sums.n1 += 1;
    sums.p1 += reach;
    sums.nc += context;
    sums.pc += reach * context;
  }

  /** How much of a step's time is believed, where it was thought to take `thoughtUs`; 0: nothing was thought. */
  #believed(kind: 'own' | 'tokens', us: number, thoughtUs: number): number {
    const factor = surprising[kind];
    const now = thoughtUs === 0 ? 0 : us > factor * thoughtUs ? 1 : us * factor < thoughtUs ? -1 : 0;
    const isOther = now !== 0 && (now === this.#surprise[kind] || (kind === 'own' && now < 0));
    this.#surprise[kind] = now;
    if (isOther) this.#fade(kind, afterSurprise);
    return now > 0 && !isOther ? factor * thoughtUs : us;
  }

  #fade(kind: 'own' | 'tokens', share: number): void {
    if (kind === 'own') this.#own.fade(share);
    else for (const name of Object.keys(this.#sums) as (keyof Sums)[]) this.#sums[name] *= share;
  }

  #solve(): void {
    const { nn, np, pp, ny, py, n1, p1, nc, pc } = this.#sums;
    const { base, slope } = this.#own.line;
    const ownUs = base * n1 + slope * nc;
    const share = ownUs > 0 ? Math.min(1, (mostOwn * ny) / ownUs) : 0;
    this.#step = { base: share * base, slope: share * slope };
    this.#tokens = lineOf(nn, np, pp, ny - share * ownUs, py - share * (base * p1 + slope * pc));
  }
}

/** What tokens `from` to `to` of a prompt look at: token i at i + 1 positions. */
export const positionsOf = (from: number, to: number): number => (Math.max(0, to - from) * (from + to + 1)) / 2;

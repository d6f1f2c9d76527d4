/**
 * A rate that decides whether more of the same is done, and is seen by doing it alone: were it wrong, nothing would correct it. So a sample
 * that says far more than what was known counts for no more than `surprising` times as much, unless the one before did as well: a
 * process that stood still for a moment tells nothing of the rest. And what is known is believed less the longer none came, half of it
 * after `halfLifeMs`: what was too slow once is tried again (as experience.ts does for tiers).
 */
import { FadingRate } from './fading-rate.ts';

const surprising = 4;
const halfLifeMs = 10_000;

export class BelievedRate {
  readonly #rate: FadingRate;
  #wasSurprising = false;
  #cameMs = Number.NEGATIVE_INFINITY;

  /** `keep`: of what is remembered at each new sample. */
  constructor(keep: number) {
    this.#rate = new FadingRate(keep);
  }

  observe(units: number, us: number, nowMs: number): void {
    if (!(units > 0) || !(us >= 0) || !Number.isFinite(units + us)) return;
    const most = (this.#rate.usPerUnit ?? Number.POSITIVE_INFINITY) * surprising * units;
    const isSurprising = most > 0 && us > most;
    // The old ones count as much as they are believed: one that comes after long decides alone.
    this.#rate.fade(this.#believed(nowMs));
    this.#rate.observe(units, isSurprising && !this.#wasSurprising ? most : us);
    this.#wasSurprising = isSurprising;
    this.#cameMs = nowMs;
  }

  /** Microseconds per unit, as far as it is believed; undefined before the first sample. */
  usPerUnit(nowMs: number): number | undefined {
    const us = this.#rate.usPerUnit;
    return us === undefined ? undefined : us * this.#believed(nowMs);
  }

  #believed(nowMs: number): number {
    return this.#cameMs === Number.NEGATIVE_INFINITY ? 1 : 0.5 ** (Math.max(0, nowMs - this.#cameMs) / halfLifeMs);
  }
}

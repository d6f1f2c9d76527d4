/**
 * A rate that decides whether more of the same is done, and is seen by doing it alone: were it wrong, nothing would correct it. So a sample
 * that says far more than what was known counts for no more than `surprising` times as much, and others that were under way with it for
 * nothing: a process that stood still for a moment tells nothing of the rest. When one that began later says the same, it is believed.
 *
 * And what is known is believed less the longer none came: what was too slow once is tried again (as experience.ts does for tiers). Half
 * of it after as long as it has been seen alike, `halfLifeMs` at least and at most: what is slow indeed is tried ever more seldom.
 */
import { FadingRate } from './fading-rate.ts';

const surprising = 4;
const halfLifeMs = { least: 10_000, most: 600_000 };
/** Rates that are no more than so many times each other. */
const alike = 2;

export class BelievedRate {
  readonly #rate: FadingRate;
  /** The last surprising one ended then; undefined: the last one was none. */
  #surprisedMs: number | undefined;
  #cameMs = Number.NEGATIVE_INFINITY;
  /** Since when it has been seen alike: no more than `alike` times from this rate. */
  #since = { ms: 0, us: 0 };

  /** `keep`: of what is remembered at each new sample. */
  constructor(keep: number) {
    this.#rate = new FadingRate(keep);
  }

  /** It ends now. */
  observe(units: number, us: number, nowMs: number): void {
    if (!(units > 0) || !(us >= 0) || !Number.isFinite(units + us)) return;
    const known = this.#rate.usPerUnit ?? 0;
    const isSurprising = known > 0 && us > surprising * known * units;
    const isAgain = this.#surprisedMs !== undefined && nowMs - us / 1_000 >= this.#surprisedMs;
    if (isSurprising && !isAgain && this.#surprisedMs !== undefined) return;
    const seenUs = isSurprising && !isAgain ? surprising * known * units : us;
    // The old ones count as much as they are believed: one that comes after long decides alone.
    this.#rate.fade(this.#believed(nowMs));
    this.#rate.observe(units, seenUs);
    this.#cameMs = nowMs;
    const now = this.#rate.usPerUnit!;
    if (Math.max(now, this.#since.us) > alike * Math.min(now, this.#since.us)) this.#since = { ms: nowMs, us: now };
    if (!isSurprising) this.#surprisedMs = undefined;
    else if (!isAgain) this.#surprisedMs = nowMs;
  }

  /** Microseconds per unit, as it was seen; undefined before the first sample. */
  get seenUs(): number | undefined {
    return this.#rate.usPerUnit;
  }

  /** Microseconds per unit, as far as it is believed; undefined before the first sample. */
  usPerUnit(nowMs: number): number | undefined {
    const us = this.#rate.usPerUnit;
    return us === undefined ? undefined : us * this.#believed(nowMs);
  }

  #believed(nowMs: number): number {
    if (this.#cameMs === Number.NEGATIVE_INFINITY) return 1;
    const halfMs = Math.min(Math.max(this.#cameMs - this.#since.ms, halfLifeMs.least), halfLifeMs.most);
    return 0.5 ** (Math.max(0, nowMs - this.#cameMs) / halfMs);
  }
}

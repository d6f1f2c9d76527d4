/**
 * The load planner: how much of a hit to load, and how long to wait for it.
 *
 * Loading is worth it only where it is faster than computing: disk and network tiers of today's systems are often
 * slower than the GPU they serve (docs/lessons.md, "Slower than without a cache"). The planner weighs the
 * node's estimate, corrected by how true such estimates turned out, plus our own copy rate, against our own prefill
 * rate. Pure: time is an argument.
 *
 *     cost(k) = round trip + correction × bring(k) + k × copy + (held − k) × compute      → the k with the least cost
 *
 * Invariant: by its own numbers a plan never costs more than computing everything. Until prefill has been measured,
 * everything is loaded.
 */

/** In chain order; counts sum to the blocks held. */
export interface Span {
  readonly tier: string;
  readonly count: number;
}

/** What is known about a hit. */
export interface Hit {
  readonly spans: readonly Span[];
  /** The node's estimate of the time to bring all of it into its arena. */
  readonly estimatedUs: number;
}

/** A prefix that could be loaded, where not every length can (attention groups with windows). */
export interface LoadChoice {
  /** Of the chain. */
  readonly blocks: number;
  /** Blocks to copy, of all groups together. */
  readonly copies: number;
  /** The node's estimate of the time to bring them into its arena. */
  readonly bringUs: number;
}

export interface Plan {
  /** Blocks to load, from the first on. */
  readonly blocks: number;
  /** Predicted time of the load, 0 when nothing is loaded. */
  readonly loadUs: number;
  /** Predicted time to compute what is not loaded. */
  readonly computeUs: number;
}

/** A rate that follows the present: older samples fade by `keep` at each new one, larger samples weigh more. */
export class FadingRate {
  readonly #keep: number;
  #units = 0;
  #us = 0;

  constructor(keep: number) {
    this.#keep = keep;
  }

  observe(units: number, us: number): void {
    if (!(units > 0) || !(us >= 0) || !Number.isFinite(units + us)) return;
    this.#units = this.#units * this.#keep + units;
    this.#us = this.#us * this.#keep + us;
  }

  /** Microseconds per unit; undefined before the first sample. */
  get usPerUnit(): number | undefined {
    return this.#units > 0 ? this.#us / this.#units : undefined;
  }
}

/** Blocks in this tier are in the arena already: bringing them costs nothing. */
const arenaTier = 'arena';
const minCorrection = 0.1;
const maxCorrection = 32;
/** Experience fades towards believing the node, half of it in this time: a tier that was slow once is tried again. */
const correctionHalfLifeMs = 10_000;
/** A deadline shorter than this only cuts loads because of a hiccup of the machine. */
const minDeadlineMs = 250;
/** A lookup may cost this share of the time to compute what it asks for, within bounds. */
const lookupShare = 0.2;
const minLookupMs = 100;
const maxLookupMs = 500;

export class LoadPlanner {
  readonly #blockTokens: number;
  readonly #loadDeadlineMs: number;
  readonly #prefill = new FadingRate(0.8);
  readonly #copy = new FadingRate(0.8);
  readonly #roundTrip = new FadingRate(0.9);
  #correction = 1;
  #correctedAtMs = 0;

  /** @param loadDeadlineMs no load waits longer, whatever it saves */
  constructor(blockTokens: number, loadDeadlineMs: number) {
    this.#blockTokens = blockTokens;
    this.#loadDeadlineMs = loadDeadlineMs;
  }

  observePrefill(tokens: number, elapsedUs: number): void {
    this.#prefill.observe(tokens, elapsedUs);
  }

  /** Blocks that were copied arena → KV cache, and the time that it took. */
  observeCopy(blocks: number, elapsedUs: number): void {
    this.#copy.observe(blocks, elapsedUs);
  }

  observeRoundTrip(elapsedUs: number): void {
    this.#roundTrip.observe(1, elapsedUs);
  }

  /** A load that was predicted to take `predictedUs` took `elapsedUs`: correct what the node says next time. */
  observeLoad(predictedUs: number, elapsedUs: number, nowMs: number): void {
    if (!(predictedUs > 0) || !(elapsedUs >= 0)) return;
    const truth = Math.min(maxCorrection, Math.max(minCorrection, (this.correction(nowMs) * elapsedUs) / predictedUs));
    this.#correction = this.correction(nowMs) * 0.5 + truth * 0.5;
    this.#correctedAtMs = nowMs;
  }

  /** By what the node's estimates are multiplied now. */
  correction(nowMs: number): number {
    const age = Math.max(0, nowMs - this.#correctedAtMs);
    return 1 + (this.#correction - 1) * 0.5 ** (age / correctionHalfLifeMs);
  }

  /** Time to compute `blocks` blocks; undefined while no prefill has been measured. */
  computeUs(blocks: number): number | undefined {
    const rate = this.#prefill.usPerUnit;
    return rate === undefined ? undefined : rate * this.#blockTokens * blocks;
  }

  plan(hit: Hit, nowMs: number): Plan {
    const held = hit.spans.reduce((sum, span) => sum + span.count, 0);
    const away = hit.spans.reduce((sum, span) => sum + (span.tier === arenaTier ? 0 : span.count), 0);
    const perBlockUs = this.computeUs(1);
    const bringUs = away === 0 ? 0 : (Math.max(0, hit.estimatedUs) * this.correction(nowMs)) / away;
    const copyUs = this.#copy.usPerUnit ?? 0;
    let best: Plan = { blocks: 0, loadUs: 0, computeUs: (perBlockUs ?? 0) * held };
    let blocks = 0;
    let loadUs = this.#roundTrip.usPerUnit ?? 0;
    for (const span of hit.spans) {
      // Cost is linear inside a span, so that its end is the best of it, unless the deadline cuts it.
      const each = copyUs + (span.tier === arenaTier ? 0 : bringUs);
      const left = this.#loadDeadlineMs * 1_000 - loadUs;
      const fits = left < 0 ? 0 : each > 0 ? Math.min(span.count, Math.floor(left / each)) : span.count;
      blocks += fits;
      loadUs += fits * each;
      const computeUs = (perBlockUs ?? 0) * (held - blocks);
      if (blocks > best.blocks && (perBlockUs === undefined || loadUs + computeUs <= best.loadUs + best.computeUs)) {
        best = { blocks, loadUs, computeUs };
      }
      if (fits < span.count) break;
    }
    return best;
  }

  /** The best of some prefixes, shortest first; what the longest one has and a shorter one not is computed. */
  planAmong(choices: readonly LoadChoice[], nowMs: number): Plan {
    const held = choices.at(-1)?.blocks ?? 0;
    const perBlockUs = this.computeUs(1);
    let best: Plan = { blocks: 0, loadUs: 0, computeUs: (perBlockUs ?? 0) * held };
    for (const { blocks, copies, bringUs } of choices) {
      const roundTripUs = this.#roundTrip.usPerUnit ?? 0;
      const loadUs = roundTripUs + copies * (this.#copy.usPerUnit ?? 0) + bringUs * this.correction(nowMs);
      if (loadUs > this.#loadDeadlineMs * 1_000) continue;
      const computeUs = (perBlockUs ?? 0) * (held - blocks);
      if (perBlockUs === undefined || loadUs + computeUs <= best.loadUs + best.computeUs) {
        best = { blocks, loadUs, computeUs };
      }
    }
    return best;
  }

  /** How long a load of `blocks` blocks may take: no longer than computing them, within reason. */
  deadlineMs(blocks: number): number {
    const computeUs = this.computeUs(blocks);
    if (computeUs === undefined) return this.#loadDeadlineMs;
    return Math.min(this.#loadDeadlineMs, Math.max(minDeadlineMs, Math.ceil(computeUs / 1_000)));
  }

  /** How long a lookup of `blocks` blocks may take before it counts as a miss. */
  lookupDeadlineMs(blocks: number): number {
    const computeUs = this.computeUs(blocks);
    if (computeUs === undefined) return maxLookupMs; // a process that has just started is slow itself
    return Math.min(maxLookupMs, Math.max(minLookupMs, Math.ceil((computeUs * lookupShare) / 1_000)));
  }
}

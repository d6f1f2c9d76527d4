/**
 * How much later than predicted things come, in the middle: a step up for each that came later, down for each that came
 * sooner, so that one that was very late counts no more than any other.
 */
export class Late {
  readonly #stepS: number;
  readonly #maxS: number;
  readonly #firstS: number;
  #s: number;

  constructor(firstS: number, maxS: number, stepS = maxS / 200) {
    this.#firstS = firstS;
    this.#s = firstS;
    this.#maxS = maxS;
    this.#stepS = stepS;
  }

  /** Seconds. */
  get s(): number {
    return this.#s;
  }

  /** `predictedS` has `s` in it. */
  came(predictedS: number, seenS: number): void {
    const moved = this.#s + (seenS > predictedS ? this.#stepS : -this.#stepS);
    this.#s = Math.min(Math.max(moved, 0), this.#maxS);
  }

  /** Nothing was learned for a while: what was, is believed less. */
  forget(part: number, towardsS = this.#firstS): void {
    this.#s += (Math.min(towardsS, this.#maxS) - this.#s) * part;
  }
}

/** Of sizes twice as long each, from 1 ms on: one request that takes 20 ms learns nothing from those that take seconds. */
const [sizes, leastS] = [16, 0.001];
const sizeOf = (predictedS: number): number =>
  Math.min(Math.max(Math.floor(Math.log2(predictedS / leastS)), 0), sizes - 1);
const lengthOf = (size: number): number => leastS * 2 ** (size + 1);

/** Of those that came last, so many tell how late the next one comes. */
const remembered = 20;
const inTen = 0.9;

/**
 * How much later than predicted nine in ten come, each size of prediction apart: of the n that came last, the one that is in place
 * 0.9 × (n + 1) by how late it was, and the last of them where they are too few. If the next is one like them, nine in ten are no
 * later (the bound of conformal prediction, Vovk et al. 2005), from the tenth that came on: whatever makes predictions wrong, it is
 * known once it has befallen ten. Whoever refuses by it learns nothing of those that it refuses: it is believed less the longer none
 * came, so that one is let in again and shows how it is now.
 *
 * Nothing counts as later than as long again as was predicted, or than `maxS` where that is more: what is predicted to wait for seconds
 * behind others is wrong by as large a part of them.
 */
export class Latest {
  readonly #maxS: number;
  readonly #sizes: Ring[] = Array.from({ length: sizes }, () => new Ring());

  constructor(maxS: number) {
    this.#maxS = maxS;
  }

  /** Seconds, of what is predicted to take so long; half of it after each `halfMs` that none came. */
  s(predictedS: number, nowMs: number, halfMs: number): number {
    const ring = this.#sizes[sizeOf(predictedS)]!;
    const lateS = Math.min(Math.max(ring.lateS, 0), Math.max(this.#maxS, predictedS));
    return lateS * 0.5 ** (Math.max(nowMs - ring.cameMs, 0) / halfMs);
  }

  came(predictedS: number, seenS: number, nowMs: number): void {
    this.#sizes[sizeOf(predictedS)]!.add(seenS - predictedS, nowMs);
  }
}

/** Workers at most, each once for each model. */
const mostWorkers = 2_048;

/** Whose answers: one worker's, of one model. */
export interface Whose {
  readonly model: string;
  readonly worker: string;
}

/**
 * `Latest` of each worker and model apart: one that is late says nothing of the others, which would be refused for it and learn nothing.
 * Beyond `mostWorkers` the one that nobody came from for longest is forgotten.
 */
export class LatestOfWorkers {
  readonly #maxS: number;
  readonly #byWorker = new Map<string, Latest>();

  constructor(maxS: number) {
    this.#maxS = maxS;
  }

  get size(): number {
    return this.#byWorker.size;
  }

  /** As `Latest.s`. */
  s(of: Whose, predictedS: number, nowMs: number, halfMs: number): number {
    return this.#byWorker.get(keyOf(of))?.s(predictedS, nowMs, halfMs) ?? 0;
  }

  /** As `Latest.came`. */
  came(of: Whose, predictedS: number, seenS: number, nowMs: number): void {
    const key = keyOf(of);
    const latest = this.#byWorker.get(key) ?? new Latest(this.#maxS);
    this.#byWorker.delete(key);
    this.#byWorker.set(key, latest);
    if (this.#byWorker.size > mostWorkers) this.#byWorker.delete(this.#byWorker.keys().next().value!);
    latest.came(predictedS, seenS, nowMs);
  }
}

const keyOf = ({ model, worker }: Whose): string => JSON.stringify([model, worker]);

/** The last ones of one size. */
class Ring {
  cameMs = Number.NEGATIVE_INFINITY;
  /** Seconds, of nine in ten. */
  lateS = 0;
  #last = new Float64Array(0);
  #count = 0;

  add(lateS: number, nowMs: number): void {
    if (this.#last.length === 0) this.#last = new Float64Array(remembered);
    this.#last[this.#count++ % remembered] = lateS;
    this.cameMs = nowMs;
    const known = this.#last.slice(0, this.#count).sort();
    this.lateS = known[Math.min(Math.ceil(inTen * (known.length + 1)), known.length) - 1]!;
  }
}

/**
 * How much later than predicted first tokens come, of requests that the decode side serves alone and of split ones, each by how long is
 * predicted. Nothing counts as later than as long again. A split that nobody has tried counts as `firstS` later than what is served
 * alone: what makes one late, a worker that has no CPU, makes the other.
 */
export class Lateness {
  readonly #firstS: number;
  readonly #alone: Late[] = [];
  readonly #split: (Late | undefined)[];
  readonly #maxS: number;

  constructor(firstS: number, maxS: number) {
    this.#firstS = firstS;
    this.#maxS = maxS;
    for (let size = 0; size < sizes; size++) this.#alone.push(this.#lateOf(size, 0));
    this.#split = new Array<Late | undefined>(sizes).fill(undefined);
  }

  /** Seconds, of what is predicted to take so long. */
  aloneS(predictedS: number): number {
    return this.#alone[sizeOf(predictedS)]!.s;
  }

  splitS(predictedS: number): number {
    const size = sizeOf(predictedS);
    return this.#split[size]?.s ?? this.#alone[size]!.s + this.#firstS;
  }

  /** Both without what is learned here. */
  came(isSplit: boolean, predictedS: number, seenS: number): void {
    const size = sizeOf(predictedS);
    const alone = this.#alone[size]!;
    if (isSplit) {
      const split = this.#split[size] ?? this.#lateOf(size, this.splitS(predictedS));
      this.#split[size] = split;
      split.came(predictedS + split.s, seenS);
    } else {
      alone.came(predictedS + alone.s, seenS);
      // What is never tried is never found to be better than it was.
      for (const [at, split] of this.#split.entries()) split?.forget(0.005, this.#alone[at]!.s + this.#firstS);
    }
  }

  #lateOf(size: number, firstS: number): Late {
    const lengthS = lengthOf(size);
    const maxS = Math.min(this.#maxS, lengthS);
    return new Late(Math.min(firstS, maxS), maxS, Math.min(this.#maxS / 200, lengthS / 40));
  }
}

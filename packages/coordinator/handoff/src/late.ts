/**
 * How much later than predicted things come, in the middle, or all but some: a step up for each that came later, down for each that came
 * sooner, so that one that was very late counts no more than any other.
 */
export class Late {
  readonly #stepS: number;
  readonly #maxS: number;
  readonly #firstS: number;
  /** Of those that come, the share that is no later. */
  readonly #share: number;
  #s: number;

  constructor(firstS: number, maxS: number, share = 0.5, stepS = maxS / 200) {
    this.#share = share;
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
    const moved = this.#s + 2 * this.#stepS * (seenS > predictedS ? this.#share : this.#share - 1);
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

/**
 * How much later than predicted nine in ten come, each size of prediction apart. Whoever refuses by it learns nothing of those that it
 * refuses: it is believed less the longer none came, so that one is let in again and shows how it is now.
 */
export class Latest {
  readonly #sizes: { readonly late: Late; cameMs: number }[] = [];

  constructor(maxS: number) {
    for (let size = 0; size < sizes; size++) {
      const late = new Late(0, maxS, 0.9, Math.min(maxS / 200, lengthOf(size) / 20));
      this.#sizes.push({ late, cameMs: Number.NEGATIVE_INFINITY });
    }
  }

  /** Seconds, of what is predicted to take so long; half of it after each `halfMs` that none came. */
  s(predictedS: number, nowMs: number, halfMs: number): number {
    const { late, cameMs } = this.#sizes[sizeOf(predictedS)]!;
    return late.s * 0.5 ** (Math.max(nowMs - cameMs, 0) / halfMs);
  }

  came(predictedS: number, seenS: number, nowMs: number): void {
    const size = this.#sizes[sizeOf(predictedS)]!;
    size.late.came(predictedS + size.late.s, seenS);
    size.cameMs = nowMs;
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
    return new Late(Math.min(firstS, maxS), maxS, 0.5, Math.min(this.#maxS / 200, lengthS / 40));
  }
}

/**
 * Sums of what happened within the last `windowMs`, in slices of an equal part of it: old ones go slice by slice. Time is an argument.
 * Memory is fixed; each call costs as much as slices have passed since the one before, at most all of them.
 */
const slices = 30;

export class SlidingSums<Name extends string> {
  readonly #sliceMs: number;
  readonly #names: readonly Name[];
  readonly #sums: Record<Name, Float64Array>;
  /** Number of the slice that is being filled; slice n lies at n modulo `slices`. */
  #slice: number;
  readonly #beganMs: number;

  constructor(names: readonly Name[], windowMs: number, nowMs: number) {
    this.#names = names;
    this.#sliceMs = windowMs / slices;
    this.#sums = Object.fromEntries(names.map((name) => [name, new Float64Array(slices)])) as Record<
      Name,
      Float64Array
    >;
    this.#slice = Math.floor(nowMs / this.#sliceMs);
    this.#beganMs = nowMs;
  }

  add(name: Name, amount: number, nowMs: number): void {
    this.#turn(nowMs);
    this.#sums[name][this.#slice % slices]! += amount;
  }

  sum(name: Name, nowMs: number): number {
    this.#turn(nowMs);
    return this.#sums[name].reduce((all, one) => all + one, 0);
  }

  /** A second; over the time since the first one, while that is shorter than the window. */
  perS(name: Name, nowMs: number): number {
    const sum = this.sum(name, nowMs);
    const coveredMs = nowMs - Math.max(this.#beganMs, (this.#slice - slices + 1) * this.#sliceMs);
    return sum / (Math.max(coveredMs, this.#sliceMs) / 1_000);
  }

  /** Since the first one could have come. */
  forMs(nowMs: number): number {
    return nowMs - this.#beganMs;
  }

  #turn(nowMs: number): void {
    const now = Math.floor(nowMs / this.#sliceMs);
    const passed = Math.min(now - this.#slice, slices);
    if (passed <= 0) return;
    for (let at = now - passed + 1; at <= now; at++) for (const name of this.#names) this.#sums[name][at % slices] = 0;
    this.#slice = now;
  }
}

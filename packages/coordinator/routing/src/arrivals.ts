/** How often requests came lately, by what they need. Bounded: the last `remembered` ones. */
const remembered = 256;
/** Fewer tell nothing. */
const fewest = 16;
/** Times as long as on average: of arrivals by chance, one gap in twenty thousand is. */
const longGap = 10;

export class Arrivals {
  readonly #atMs = new Float64Array(remembered);
  readonly #needsMs = new Float64Array(remembered);
  #count = 0;

  came(nowMs: number, needsMs: number): void {
    const at = this.#count++ % remembered;
    this.#atMs[at] = nowMs;
    this.#needsMs[at] = needsMs;
  }

  /** A second, of those that need less than `needsMs`, as if none had come before the first one in `overS` seconds. */
  shorterPerS(needsMs: number, nowMs: number, overS: number): number {
    const known = Math.min(this.#count, remembered);
    if (known < fewest) return 0;
    let shorter = 0;
    let sinceMs = nowMs;
    for (let i = 0; i < known; i++) {
      if (this.#needsMs[i]! < needsMs) shorter++;
      sinceMs = Math.min(sinceMs, this.#atMs[i]!);
    }
    return shorter / Math.max((nowMs - sinceMs) / 1000, overS, 1e-3);
  }

  /** None came for many times as long as it takes on average until one does. */
  haveEnded(nowMs: number): boolean {
    const known = Math.min(this.#count, remembered);
    if (known < fewest) return false;
    const lastMs = this.#atMs[(this.#count - 1) % remembered]!;
    const firstMs = this.#atMs[this.#count <= remembered ? 0 : this.#count % remembered]!;
    return nowMs - lastMs > longGap * Math.max((lastMs - firstMs) / known, 1);
  }
}

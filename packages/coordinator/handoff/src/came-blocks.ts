/**
 * Blocks that came to one node, and when, whichever hand-off they belong to. Several share a link: what one of them saw of it alone is
 * a part of its rate.
 *
 * However many reports come, none is lost before it is old. Where they are more than `most`, neighbours become one, of the later one's
 * time, as far as they are no longer apart than a 32nd of how long ago they are: over all that is kept some hundreds are left then, and
 * what came since any moment is known to within a 32nd of the time since.
 */
const most = 1_024;
const fineness = 32;

export class CameBlocks {
  /** Milliseconds, blocks. In the order of time. */
  #reports: (readonly [ms: number, blocks: number])[] = [];
  readonly #keptMs: number;

  /** `keptMs`: nobody asks for what came so long before the last one. */
  constructor(keptMs: number) {
    this.#keptMs = keptMs;
  }

  /** Reports that are held. */
  get size(): number {
    return this.#reports.length;
  }

  /** `ms` may be past: that the last ones came is told with the first token. */
  came(blocks: number, ms: number): void {
    if (blocks <= 0) return;
    const reports = this.#reports;
    let at = reports.length;
    while (at > 0 && reports[at - 1]![0] > ms) at--;
    reports.splice(at, 0, [ms, blocks]);
    const oldestMs = reports.at(-1)![0] - this.#keptMs;
    if (reports[0]![0] < oldestMs)
      reports.splice(
        0,
        reports.findIndex(([ms]) => ms >= oldestMs),
      );
    if (reports.length > most) this.#join();
  }

  /** Blocks that came after `fromMs`, until `toMs`. */
  between(fromMs: number, toMs: number): number {
    let sum = 0;
    for (let at = this.#reports.length - 1; at >= 0; at--) {
      const [ms, blocks] = this.#reports[at]!;
      if (ms <= fromMs) break;
      if (ms <= toMs) sum += blocks;
    }
    return sum;
  }

  #join(): void {
    const lastMs = this.#reports.at(-1)![0];
    const joined: (readonly [number, number])[] = [];
    for (const [ms, blocks] of this.#reports) {
      // Whatever the last of them stands for came after the one before it.
      const sinceMs = joined.at(-2)?.[0] ?? Number.NEGATIVE_INFINITY;
      if (ms - sinceMs <= (lastMs - ms) / fineness) joined.push([ms, joined.pop()![1] + blocks]);
      else joined.push([ms, blocks]);
    }
    this.#reports = joined;
  }
}

/**
 * Blocks that came to one node, and when, whichever hand-off they belong to. Several share a link: what one of them saw of it alone is
 * a part of its rate.
 */

/** Reports that are kept: of seconds, not of an answer. Twice as many before the older half goes. */
const kept = 1_024;

export class CameBlocks {
  /** As they were told: milliseconds, blocks. In the order of time. */
  readonly #reports: (readonly [ms: number, blocks: number])[] = [];

  /** `ms` may be past: that the last ones came is told with the first token. */
  came(blocks: number, ms: number): void {
    if (blocks <= 0) return;
    const reports = this.#reports;
    let at = reports.length;
    while (at > 0 && reports[at - 1]![0] > ms) at--;
    reports.splice(at, 0, [ms, blocks]);
    if (reports.length > 2 * kept) reports.splice(0, kept);
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
}

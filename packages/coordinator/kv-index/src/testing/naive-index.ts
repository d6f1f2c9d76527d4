/** What the index must say, written down in the plainest way. */
import type { Match } from '../kv-index.ts';
import type { Target } from '../targets.ts';

export class NaiveIndex {
  /** "source/medium" → block → copies. */
  readonly #held = new Map<string, Map<number, number>>();

  stored(source: number, medium: number, blocks: readonly number[]): void {
    const held = this.#of(source, medium);
    for (const block of blocks) held.set(block, (held.get(block) ?? 0) + 1);
  }

  removed(source: number, medium: number, blocks: readonly number[]): void {
    const held = this.#of(source, medium);
    for (const block of blocks) {
      const count = held.get(block) ?? 0;
      if (count > 1) held.set(block, count - 1);
      else held.delete(block);
    }
  }

  cleared(source: number, medium?: number): void {
    for (let i = 0; i < 8; i++) if (medium === undefined || medium === i) this.#of(source, i).clear();
  }

  match(chain: readonly number[], targets: readonly Target[]): Match[] {
    return targets.map(({ sources }) => {
      const byMedium = new Int32Array(8);
      let blocks = 0;
      for (const block of chain) {
        const medium = [0, 1, 2, 3, 4, 5, 6, 7].find((m) => sources.some((source) => this.#of(source, m).has(block)));
        if (medium === undefined) break;
        byMedium[medium]!++;
        blocks++;
      }
      return { blocks, byMedium };
    });
  }

  /** Blocks that anybody holds. */
  get blocks(): number {
    return new Set([...this.#held.values()].flatMap((held) => [...held.keys()])).size;
  }

  #of(source: number, medium: number): Map<number, number> {
    const name = `${source}/${medium}`;
    let held = this.#held.get(name);
    if (!held) {
      held = new Map();
      this.#held.set(name, held);
    }
    return held;
  }
}

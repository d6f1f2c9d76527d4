/** Who holds what, told by a stream of events, written down in the plainest way. */
import type { StreamItem } from '../continuity.ts';
import { type BlockHash, integerOf, type KvEvent, type KvEventBatch, media } from '../event.ts';

export class NaiveHolders {
  /** "source topic rank group medium" → integer form of a hash → copies. */
  readonly #held = new Map<string, Map<bigint, number>>();
  /** Removals of what was never stored. */
  unknownRemovals = 0;

  /** Blocks that are held, once for each who holds them. */
  get blocks(): number {
    return [...this.#held.values()].reduce((sum, { size }) => sum + size, 0);
  }

  apply(source: string, item: StreamItem): void {
    if (item.kind === 'batch')
      for (const event of item.batch.events) this.#event(`${source} ${item.topic}`, item.batch, event);
    else this.#forget((name) => name.startsWith(`${source} `));
  }

  /** "source topic rank group medium" of each who holds this block. */
  holdersOf(hash: BlockHash): string[] {
    return [...this.#held].filter(([, held]) => held.has(integerOf(hash))).map(([name]) => name);
  }

  #event(publisher: string, { dataParallelRank }: KvEventBatch, event: KvEvent): void {
    const medium = event.medium ?? media.gpu;
    const rank = `${publisher} ${dataParallelRank ?? '-'}`;
    if (event.type === 'AllBlocksCleared') {
      this.#forget((name) => name.startsWith(`${rank} `) && name.endsWith(` ${medium}`));
      return;
    }
    if (event.type === 'BlockStored' && event.reused) return;
    const name = `${rank} ${event.groupIdx ?? 0} ${medium}`;
    const held = this.#held.get(name) ?? new Map<bigint, number>();
    this.#held.set(name, held);
    for (const hash of event.blockHashes.map(integerOf)) {
      const count = held.get(hash) ?? 0;
      if (event.type === 'BlockStored') held.set(hash, count + 1);
      else if (count > 1) held.set(hash, count - 1);
      else if (!held.delete(hash)) this.unknownRemovals++;
    }
  }

  #forget(which: (name: string) => boolean): void {
    for (const name of this.#held.keys()) if (which(name)) this.#held.delete(name);
  }
}

/**
 * What one publisher says of one kind of block, as a source of the index: of an engine's data-parallel rank and attention group, of a
 * node's namespace, of a shared medium. A publisher that claims to hold more than it can has told a lie somewhere: all of it is forgotten.
 */
import { maxMedia } from '../clears.ts';
import type { Keys, KvIndex, Parent } from '../kv-index.ts';

/** What the group attends to: all blocks, or a window of the last ones. */
export interface Window {
  /** undefined: all that came before. */
  readonly tokens: number | undefined;
}

export class Part {
  readonly source: number;
  readonly #index: KvIndex;
  readonly #maxBlocks: number;
  /**
   * Stored less removed, by medium. Less than what is held where things are removed that were stored before we listened; to leave those out
   * would count what the index has forgotten for ever, and find an honest publisher a liar.
   */
  readonly #blocks = new Float64Array(maxMedia);
  /** Its number is another's now. */
  #isClosed = false;
  /** Of an attention group. */
  window: Window = { tokens: undefined };

  /** KvError CONFIG: the index has no source left. */
  constructor(index: KvIndex, maxBlocks: number) {
    this.#index = index;
    this.#maxBlocks = maxBlocks;
    this.source = index.addSource();
  }

  /** False: more than it can hold; nothing of it is believed any more. */
  stored(medium: number, keys: Keys, parent: Parent): boolean {
    if (this.#isClosed) return true;
    this.#index.stored(this.source, medium, keys, parent);
    this.#blocks[medium]! += keys.length / 2;
    if (this.#blocks[medium]! <= this.#maxBlocks) return true;
    this.cleared();
    return false;
  }

  removed(medium: number, keys: Keys): void {
    if (this.#isClosed) return;
    this.#index.removed(this.source, medium, keys);
    this.#blocks[medium] = Math.max(0, this.#blocks[medium]! - keys.length / 2);
  }

  /** Of one medium, or of all. */
  cleared(medium?: number): void {
    if (this.#isClosed) return;
    this.#index.cleared(this.source, medium);
    if (medium === undefined) this.#blocks.fill(0);
    else this.#blocks[medium] = 0;
  }

  /** Nothing of it is said to the index after this. */
  close(): void {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#index.removeSource(this.source);
  }
}

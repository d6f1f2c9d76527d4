/**
 * Blocks that came to one node, whichever hand-off they belong to. Several share a link: what one of them saw of it alone is a part of
 * its rate. There is one sum of each node, and each hand-off notes how it stood when its first block was ready, and when others of its own
 * came: nothing is kept of the time between.
 */
export interface CameBlocks {
  /** Of all hand-offs to the node, so far. */
  sum: number;
}

/** What others had from the same link while one hand-off waited for it. */
export class OthersCame {
  readonly #all: CameBlocks;
  #own = 0;
  /** How many blocks of others there were, and when. */
  #begun = 0;
  #last = { ms: 0, blocks: 0 };

  constructor(all: CameBlocks) {
    this.#all = all;
  }

  /** The first block of its own is ready. */
  begins(ms: number): void {
    this.#begun = this.#others;
    this.#last = { ms, blocks: this.#begun };
  }

  /** More blocks of its own have come. */
  came(blocks: number, ms: number): void {
    this.#all.sum += blocks;
    this.#own += blocks;
    this.#last = { ms, blocks: this.#others };
  }

  /**
   * Blocks of others, from `begins` on. Its own last one came at `ms`, which is told at `nowMs`, when the rest of the prompt is computed:
   * what others had since its last but that one counts as if it had come evenly.
   */
  until(ms: number, nowMs: number): number {
    const { ms: lastMs, blocks } = this.#last;
    const share = nowMs > lastMs ? Math.min(Math.max(ms - lastMs, 0) / (nowMs - lastMs), 1) : 1;
    return blocks - this.#begun + (this.#others - blocks) * share;
  }

  get #others(): number {
    return this.#all.sum - this.#own;
  }
}

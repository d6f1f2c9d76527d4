/** Blocks of one medium, the one that was used longest ago first; those that are in use (`hold`) stay. */
export class Lru {
  readonly capacity: number;
  /** Block → how many use it. */
  readonly #blocks = new Map<number, number>();

  /** Blocks that somebody uses. */
  held = 0;

  constructor(capacity: number) {
    this.capacity = capacity;
  }

  get size(): number {
    return this.#blocks.size;
  }

  has(block: number): boolean {
    return this.#blocks.has(block);
  }

  /** The block is the one used last; in use by `users` more. */
  use(block: number, users = 0): void {
    const before = this.#blocks.get(block) ?? 0;
    if (before === 0 && users > 0) this.held++;
    this.#blocks.delete(block);
    this.#blocks.set(block, before + users);
  }

  release(block: number): void {
    const users = this.#blocks.get(block);
    if (users === undefined) return;
    if (users === 1) this.held--;
    this.#blocks.set(block, users - 1);
  }

  /** Takes out the unused ones that are above `capacity − reserved`, oldest first; they are returned. */
  shrink(reserved: number): number[] {
    const gone: number[] = [];
    if (this.#blocks.size + reserved <= this.capacity) return gone;
    for (const [block, users] of this.#blocks) {
      if (users > 0) continue;
      this.#blocks.delete(block);
      gone.push(block);
      if (this.#blocks.size + reserved <= this.capacity) break;
    }
    return gone;
  }
}

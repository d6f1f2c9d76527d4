/** What a simulated engine or tier holds, and what it held: the truth that an index is compared with. */

/** One who holds blocks: on one medium, at most so many, the oldest go first. */
export class Held {
  /** Hash → copies, the one used longest ago first. */
  readonly copies = new Map<bigint, number>();
  readonly droppedAtMs = new Map<bigint, number>();
  readonly most: number;

  constructor(most: number) {
    this.most = most;
  }

  add(hash: bigint, copies = 1): void {
    const before = this.copies.get(hash) ?? 0;
    this.copies.delete(hash);
    this.copies.set(hash, before + copies);
    this.droppedAtMs.delete(hash);
  }

  drop(hash: bigint, nowMs: number): void {
    const left = this.copies.get(hash)! - 1;
    if (left > 0) this.copies.set(hash, left);
    else {
      this.copies.delete(hash);
      this.droppedAtMs.set(hash, nowMs);
    }
  }

  clear(nowMs: number): void {
    for (const hash of this.copies.keys()) this.droppedAtMs.set(hash, nowMs);
    this.copies.clear();
  }
}

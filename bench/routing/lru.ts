/**
 * Blocks of one medium, the one that was used longest ago first; those that are in use (`use` with users) stay. Blocks are numbers from 0 on, so
 * what is known of one lies at its place in arrays, and those that nobody uses are a list from the oldest on: whatever is asked costs
 * the same, however many there are. (A Map in which each use moves its entry to the end walks over all that were moved.)
 */

const absent = -1;
const firstPlaces = 1_024;

export class Lru {
  readonly capacity: number;
  /** By block: how many use it; `absent`: it is not here. */
  #users = new Int32Array(firstPlaces).fill(absent);
  /** Of a block that nobody uses, by its number + 1: the next older and the next newer one. 0 stands before the first and behind the last. */
  #older = new Int32Array(firstPlaces + 1);
  #newer = new Int32Array(firstPlaces + 1);

  /** Blocks that somebody uses. */
  held = 0;
  size = 0;
  /** Places of the list that were read or written: what the work was. */
  touched = 0;

  constructor(capacity: number) {
    this.capacity = capacity;
  }

  has(block: number): boolean {
    return block < this.#users.length && this.#users[block] !== absent;
  }

  isUsed(block: number): boolean {
    return block < this.#users.length && this.#users[block]! > 0;
  }

  /** The block is the one used last; in use by `users` more. */
  use(block: number, users = 0): void {
    if (block >= this.#users.length) this.#grow(block);
    const before = this.#users[block]!;
    if (before === absent) this.size++;
    else if (before === 0) this.#unlink(block + 1);
    const now = Math.max(before, 0) + users;
    this.#users[block] = now;
    if (now === 0) this.#append(block + 1);
    else if (before <= 0) this.held++;
  }

  /** One uses it no more: of the last one it is the one used last. */
  release(block: number): void {
    if (!this.has(block) || this.#users[block] === 0) return;
    if (--this.#users[block]! > 0) return;
    this.held--;
    this.#append(block + 1);
  }

  /** Takes out the unused ones that are above `capacity − reserved`, oldest first; they are returned. */
  shrink(reserved: number): number[] {
    const gone: number[] = [];
    while (this.size + reserved > this.capacity) {
      const oldest = this.#newer[0]!;
      if (oldest === 0) break;
      this.#unlink(oldest);
      this.#users[oldest - 1] = absent;
      this.size--;
      gone.push(oldest - 1);
    }
    return gone;
  }

  #append(at: number): void {
    this.touched++;
    const newest = this.#older[0]!;
    this.#older[at] = newest;
    this.#newer[at] = 0;
    this.#newer[newest] = at;
    this.#older[0] = at;
  }

  #unlink(at: number): void {
    this.touched++;
    const older = this.#older[at]!;
    const newer = this.#newer[at]!;
    this.#newer[older] = newer;
    this.#older[newer] = older;
  }

  #grow(block: number): void {
    const places = 2 ** Math.ceil(Math.log2(block + 2));
    this.#users = grown(this.#users, places, absent);
    this.#older = grown(this.#older, places + 1, 0);
    this.#newer = grown(this.#newer, places + 1, 0);
  }
}

function grown(array: Int32Array, length: number, fill: number): Int32Array<ArrayBuffer> {
  const longer = new Int32Array(length).fill(fill, array.length);
  longer.set(array);
  return longer;
}

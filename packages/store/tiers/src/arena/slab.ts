/**
 * A run of chunks of an arena, cut into slots of one size.
 *
 *     slot:   free ──take──▶ in use ◀──▶ idle (its block can go) ──free──▶ free
 *
 * Invariant: `freeCount` and `usedCount` are what `states` says.
 */
import { invariant } from '@kvtier/errors';

const free = 0;
const inUse = 1;
const idle = 2;

export class Slab {
  readonly firstChunk: number;
  readonly chunkCount: number;
  readonly slotBytes: number;
  readonly slotCount: number;
  /** Of each slot. */
  readonly #states: Uint8Array;
  /** Indexes of free slots, a stack of `freeCount`. */
  readonly #freeSlots: Int32Array;
  #freeCount: number;
  #usedCount = 0;

  constructor(firstChunk: number, chunkCount: number, chunkBytes: number, slotBytes: number) {
    this.firstChunk = firstChunk;
    this.chunkCount = chunkCount;
    this.slotBytes = slotBytes;
    this.slotCount = Math.floor((chunkCount * chunkBytes) / slotBytes);
    this.#states = new Uint8Array(this.slotCount);
    this.#freeSlots = Int32Array.from({ length: this.slotCount }, (_, index) => this.slotCount - 1 - index);
    this.#freeCount = this.slotCount;
  }

  get freeCount(): number {
    return this.#freeCount;
  }

  get isEmpty(): boolean {
    return this.#freeCount === this.slotCount;
  }

  /** There is something in it, and all of it can go. */
  get isIdle(): boolean {
    return this.#usedCount === 0 && this.#freeCount < this.slotCount;
  }

  has(index: number): boolean {
    return Number.isInteger(index) && this.#states[index] !== undefined && this.#states[index] !== free;
  }

  isIdleAt(index: number): boolean {
    return this.#states[index] === idle;
  }

  /** The index of a free slot, of which there is one; it is in use. */
  take(): number {
    const index = this.#freeSlots[--this.#freeCount]!;
    this.#states[index] = inUse;
    this.#usedCount++;
    return index;
  }

  free(index: number): void {
    if (this.#states[index] === inUse) this.#usedCount--;
    this.#states[index] = free;
    this.#freeSlots[this.#freeCount++] = index;
  }

  setIdle(index: number, isIdle: boolean): void {
    if (this.isIdleAt(index) === isIdle) return;
    this.#states[index] = isIdle ? idle : inUse;
    this.#usedCount += isIdle ? -1 : 1;
  }

  /** Indexes of the slots that are not free. */
  taken(): number[] {
    const indexes: number[] = [];
    for (let index = 0; index < this.slotCount; index++) if (this.#states[index] !== free) indexes.push(index);
    return indexes;
  }

  checkIntegrity(): void {
    const count = (state: number): number => this.#states.reduce((sum, each) => sum + Number(each === state), 0);
    invariant(count(free) === this.#freeCount, 'slot allocator: a slab lost a slot');
    invariant(count(inUse) === this.#usedCount, 'slot allocator: a slab miscounts what is in use');
    const listed = new Set(this.#freeSlots.subarray(0, this.#freeCount));
    invariant(listed.size === this.#freeCount, 'slot allocator: a slot is free twice');
    for (const index of listed) invariant(!this.has(index), 'slot allocator: a free slot is allocated');
  }
}

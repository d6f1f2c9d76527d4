/**
 * Slots of several sizes in one arena, in O(1): a slab allocator over offsets (after Linux SLUB and memcached's slabs).
 *
 *     0      4096
 *     ┌──────┬─────────┬─────────┬─────────┬─────────┬──
 *     │ page │ chunk 0 │ chunk 1 │ chunk 2 │ chunk 3 │ …
 *     └──────┴─────────┴─────────┴─────────┴─────────┴──
 *             └ slab: slots of size A ───┘ └ slab: B ┘     a slab is a run of whole chunks, cut into slots of one size
 *
 * Invariant: allocated slots are disjoint, 4096-aligned, inside the arena, and each belongs to exactly one slab. A slab
 * without allocated slots may be given up for another size at any time. An allocated slot is in use until its owner says
 * that it is idle: so it is known, and looked for nowhere, which slabs can be emptied.
 */
import { invariant } from '@kvtier/errors';
import { slotAlignment } from '@kvtier/identity';
import { Slab } from './slab.ts';

/** A slab is made longer until it wastes at most this share of its bytes. */
const maxWaste = 1 / 8;
const longestSlabChunks = 64;
/** A slot on loan is at most so many times as long as what lies in it: encoded blocks are not much smaller than decoded ones. */
const mostSpare = 4;

export class SlotAllocator {
  /** The first page of an arena is its own header. */
  static readonly firstOffset = slotAlignment;
  readonly chunkBytes: number;
  readonly #chunks: (Slab | undefined)[];
  /** Slabs of a slot size that have free slots; an insertion-ordered set. */
  readonly #open = new Map<number, Set<Slab>>();
  /** Of sizes that have slabs. */
  readonly #slabBytes = new Map<number, number>();
  /** How many slabs of a slot size have something in them that can go, all of it. */
  readonly #idleSlabs = new Map<number, number>();
  #allocatedBytes = 0;

  /** `chunkBytes` defaults to about 1/64 of the arena, a power of two between 256 KiB and 64 MiB. */
  constructor(arenaBytes: number, chunkBytes = defaultChunkBytes(arenaBytes)) {
    invariant(chunkBytes % slotAlignment === 0, 'slot allocator: chunks are whole pages');
    this.chunkBytes = chunkBytes;
    const chunkCount = Math.floor((arenaBytes - SlotAllocator.firstOffset) / chunkBytes);
    this.#chunks = new Array<Slab | undefined>(Math.max(0, chunkCount)).fill(undefined);
  }

  /** Bytes that can ever be allocated. */
  get capacityBytes(): number {
    return this.#chunks.length * this.chunkBytes;
  }

  get allocatedBytes(): number {
    return this.#allocatedBytes;
  }

  /** Bytes of all slabs of a slot size. */
  slabBytesOf(slotBytes: number): number {
    return this.#slabBytes.get(slotBytes) ?? 0;
  }

  /** Slot sizes that have slabs. */
  get sizeCount(): number {
    return this.#slabBytes.size;
  }

  /** The smallest slot size that has slabs and room for so many bytes, if that wastes no more than it holds several times over. */
  sizeFor(bytes: number): number | undefined {
    let best: number | undefined;
    for (const slotBytes of this.#slabBytes.keys()) {
      if (slotBytes >= bytes && slotBytes <= bytes * mostSpare && slotBytes < (best ?? Number.POSITIVE_INFINITY)) {
        best = slotBytes;
      }
    }
    return best;
  }

  /** Bytes of one slab of a slot size, as it is usually made. */
  slabSpanOf(slotBytes: number): number {
    return slabChunks(slotBytes, this.chunkBytes) * this.chunkBytes;
  }

  /** An allocated slot is in use, or not. */
  setIdle(slot: number, isIdle: boolean): void {
    const { slab, index } = this.#locate(slot);
    const was = slab.isIdle;
    slab.setIdle(index, isIdle);
    this.#countIdle(slab, was);
  }

  isIdle(slot: number): boolean {
    const { slab, index } = this.#locate(slot);
    return slab.isIdleAt(index);
  }

  /** Nothing in the slab that this slot lies in is in use. */
  isSlabIdle(slot: number): boolean {
    return this.#locate(slot).slab.isIdle;
  }

  /** Some slab of a slot size has something in it, and nothing in use. */
  hasIdleSlab(slotBytes: number): boolean {
    return this.#idleSlabs.has(slotBytes);
  }

  /**
   * The allocated slots of a run of slabs that, emptied, has room for a slot of `slotBytes`; the run with the fewest allocated
   * bytes in which nothing is in use. Rare: it looks at every chunk.
   */
  cheapestRun(slotBytes: number): number[] | undefined {
    const least = Math.ceil(slotBytes / this.chunkBytes);
    const costs = new Map<Slab, number>();
    for (const slab of this.#chunks) {
      if (slab === undefined) continue;
      const bytes = (slab.slotCount - slab.freeCount) * slab.slotBytes;
      costs.set(slab, slab.isIdle || slab.isEmpty ? bytes : Number.POSITIVE_INFINITY);
    }
    let best: Set<Slab> | undefined;
    let bestCost = Number.POSITIVE_INFINITY;
    for (let first = 0; first + least <= this.#chunks.length; first++) {
      const slabs = new Set(this.#chunks.slice(first, first + least).filter((slab) => slab !== undefined));
      let cost = 0;
      for (const slab of slabs) cost += costs.get(slab)!;
      if (cost < bestCost) [best, bestCost] = [slabs, cost];
    }
    return best && [...best].flatMap((slab) => this.#slotsOf(slab));
  }

  /** The largest slot that an empty arena can hold. */
  get maxSlotBytes(): number {
    return Math.min(this.#chunks.length, longestSlabChunks) * this.chunkBytes;
  }

  /** `allocate` would find a slot. */
  hasFree(slotBytes: number): boolean {
    if ((this.#open.get(slotBytes)?.size ?? 0) > 0) return true;
    const mayBe = (slab: Slab | undefined): boolean => slab === undefined || slab.isEmpty;
    return this.#findRun(Math.ceil(slotBytes / this.chunkBytes), mayBe) !== undefined;
  }

  /** A free slot of `slotBytes` (a multiple of 4096), or undefined when there is none. */
  allocate(slotBytes: number): number | undefined {
    invariant(
      slotBytes > 0 && slotBytes % slotAlignment === 0,
      () => `slot allocator: ${slotBytes} is not whole pages`,
    );
    let slab = this.#open.get(slotBytes)?.values().next().value;
    slab ??= this.#newSlab(slotBytes);
    if (slab === undefined) return undefined;
    const was = slab.isIdle;
    const index = slab.take();
    this.#countIdle(slab, was);
    if (slab.freeCount === 0) this.#open.get(slotBytes)!.delete(slab);
    this.#allocatedBytes += slotBytes;
    return this.#offsetOf(slab) + index * slotBytes;
  }

  free(slot: number): void {
    const { slab, index } = this.#locate(slot);
    const was = slab.isIdle;
    slab.free(index);
    this.#countIdle(slab, was);
    this.#openSlabs(slab.slotBytes).add(slab);
    this.#allocatedBytes -= slab.slotBytes;
  }

  slotBytesOf(slot: number): number {
    return this.#locate(slot).slab.slotBytes;
  }

  /** The allocated slots that share a slab with this one: all of them must go before the slab can change its size. */
  neighbours(slot: number): number[] {
    return this.#slotsOf(this.#locate(slot).slab);
  }

  #slotsOf(slab: Slab): number[] {
    const offset = this.#offsetOf(slab);
    return slab.taken().map((index) => offset + index * slab.slotBytes);
  }

  /** After a change of the slab, which `was` idle before it. */
  #countIdle(slab: Slab, was: boolean): void {
    if (slab.isIdle === was) return;
    const count = (this.#idleSlabs.get(slab.slotBytes) ?? 0) + (was ? -1 : 1);
    if (count === 0) this.#idleSlabs.delete(slab.slotBytes);
    else this.#idleSlabs.set(slab.slotBytes, count);
  }

  checkIntegrity(): void {
    let allocatedBytes = 0;
    const idleSlabs = new Map<number, number>();
    const slabs = new Set(this.#chunks.filter((slab) => slab !== undefined));
    for (const slab of slabs) {
      for (let chunk = slab.firstChunk; chunk < slab.firstChunk + slab.chunkCount; chunk++) {
        invariant(this.#chunks[chunk] === slab, () => `slot allocator: chunk ${chunk} belongs to two slabs`);
      }
      slab.checkIntegrity();
      if (slab.isIdle) idleSlabs.set(slab.slotBytes, (idleSlabs.get(slab.slotBytes) ?? 0) + 1);
      invariant(
        (this.#open.get(slab.slotBytes)?.has(slab) ?? false) === slab.freeCount > 0,
        'slot allocator: open slabs and free slots disagree',
      );
      allocatedBytes += (slab.slotCount - slab.freeCount) * slab.slotBytes;
    }
    invariant(allocatedBytes === this.#allocatedBytes, 'slot allocator: accounting is off');
    invariant(idleSlabs.size === this.#idleSlabs.size, 'slot allocator: sizes with idle slabs are miscounted');
    for (const [slotBytes, count] of idleSlabs)
      invariant(this.#idleSlabs.get(slotBytes) === count, 'slot allocator: idle slabs are miscounted');
  }

  #newSlab(slotBytes: number): Slab | undefined {
    const wanted = slabChunks(slotBytes, this.chunkBytes);
    const least = Math.ceil(slotBytes / this.chunkBytes);
    let firstChunk = this.#findRun(wanted);
    if (firstChunk === undefined && this.#giveUpEmptySlabs()) firstChunk = this.#findRun(wanted);
    let chunkCount = wanted;
    if (firstChunk === undefined) {
      chunkCount = least;
      firstChunk = this.#findRun(least);
    }
    if (firstChunk === undefined) return undefined;
    const slab = new Slab(firstChunk, chunkCount, this.chunkBytes, slotBytes);
    this.#chunks.fill(slab, firstChunk, firstChunk + chunkCount);
    this.#slabBytes.set(slotBytes, this.slabBytesOf(slotBytes) + chunkCount * this.chunkBytes);
    this.#openSlabs(slotBytes).add(slab);
    return slab;
  }

  /** First fit; rare: once per slab. */
  #findRun(length: number, isFree: (slab: Slab | undefined) => boolean = isUnused): number | undefined {
    let run = 0;
    for (let chunk = 0; chunk < this.#chunks.length; chunk++) {
      run = isFree(this.#chunks[chunk]) ? run + 1 : 0;
      if (run === length) return chunk - length + 1;
    }
    return undefined;
  }

  #giveUpEmptySlabs(): boolean {
    let found = false;
    for (const [slotBytes, slabs] of this.#open) {
      for (const slab of slabs) {
        if (!slab.isEmpty) continue;
        slabs.delete(slab);
        this.#chunks.fill(undefined, slab.firstChunk, slab.firstChunk + slab.chunkCount);
        const left = this.slabBytesOf(slotBytes) - slab.chunkCount * this.chunkBytes;
        if (left > 0) this.#slabBytes.set(slotBytes, left);
        else this.#slabBytes.delete(slotBytes);
        found = true;
      }
      if (slabs.size === 0) this.#open.delete(slotBytes);
    }
    return found;
  }

  #openSlabs(slotBytes: number): Set<Slab> {
    let slabs = this.#open.get(slotBytes);
    if (slabs === undefined) {
      slabs = new Set();
      this.#open.set(slotBytes, slabs);
    }
    return slabs;
  }

  #offsetOf(slab: Slab): number {
    return SlotAllocator.firstOffset + slab.firstChunk * this.chunkBytes;
  }

  #locate(slot: number): { slab: Slab; index: number } {
    const slab = this.#chunks[Math.floor((slot - SlotAllocator.firstOffset) / this.chunkBytes)];
    const index = slab === undefined ? -1 : (slot - this.#offsetOf(slab)) / slab.slotBytes;
    invariant(slab?.has(index) === true, () => `slot allocator: ${slot} is not an allocated slot`);
    return { slab, index };
  }
}

const isUnused = (slab: Slab | undefined): boolean => slab === undefined;

function defaultChunkBytes(arenaBytes: number): number {
  const wanted = 2 ** Math.floor(Math.log2(Math.max(1, arenaBytes / 64)));
  return Math.min(64 << 20, Math.max(256 << 10, wanted));
}

/** Chunks per slab: the fewest that hold a slot and waste little. */
function slabChunks(slotBytes: number, chunkBytes: number): number {
  const least = Math.ceil(slotBytes / chunkBytes);
  for (let count = least; count <= Math.min(longestSlabChunks, least * 8); count++) {
    const bytes = count * chunkBytes;
    if ((bytes % slotBytes) / bytes <= maxWaste) return count;
  }
  return least;
}

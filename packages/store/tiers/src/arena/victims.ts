/**
 * Whose place a new slot takes in an arena where none is free: the choice of victims among blocks of all sizes.
 *
 *     of the same size ──▶ of a size that nobody uses ──▶ a slab of a size above its share ──▶ a run of slabs of any sizes
 *
 * A block of the same size leaves a slot. Of another size a whole slab has to go, in which nothing is in use: which slabs are such, the
 * allocator knows, so that no size is walked over in vain, whatever is pinned of it.
 */
import { roomAsks } from '../kit/passing-over.ts';
import type { Ranked } from './size-class.ts';
import type { SizeClasses } from './size-classes.ts';
import type { SlotAllocator } from './slot-allocator.ts';

/** A listed block. */
interface Listed extends Ranked {
  readonly slot: number;
}

export interface VictimsOptions<E extends Listed> {
  /** Idle are slots of listed blocks that nobody uses, and no others. */
  readonly allocator: SlotAllocator;
  readonly classes: SizeClasses<E>;
  /** The block in a slot, of which there is one. */
  readonly entryAt: (slot: number) => E;
  /** It leaves its class, and its slot is free. */
  readonly evict: (entry: E) => void;
}

export class Victims<E extends Listed> {
  readonly #allocator: SlotAllocator;
  readonly #classes: SizeClasses<E>;
  readonly #entryAt: (slot: number) => E;
  readonly #evict: (entry: E) => void;
  #makeRoom: () => boolean = () => false;
  /** Sizes of which, since it was last asked for room, a slot was freed or a block came to be idle. */
  readonly #loosened = new Set<number>();

  constructor({ allocator, classes, entryAt, evict }: VictimsOptions<E>) {
    this.#allocator = allocator;
    this.#classes = classes;
    this.#entryAt = entryAt;
    this.#evict = evict;
  }

  /** See `ArenaTop.whenFull` of packages/store/placement. */
  whenFull(makeRoom: () => boolean): void {
    this.#makeRoom = makeRoom;
  }

  /** Somebody has let go of a slot or a block of this size. */
  letGo(slotBytes: number): void {
    this.#loosened.add(slotBytes);
  }

  /** A slot in the place of others; undefined when all that is left is in use. */
  makeWay(slotBytes: number): number | undefined {
    return this.#allocateByEviction(slotBytes) ?? this.#allocateByAsking(slotBytes);
  }

  /**
   * Take the place of the coldest block: of the same size while that size holds its share of the arena, else of the slab of
   * another size that was used longest ago. A size that holds less than an even share takes from those that hold more; one
   * that has nothing takes from anybody, and whatever a size holds, it takes from those that are unused.
   */
  #allocateByEviction(slotBytes: number): number | undefined {
    const own = this.#coldest(slotBytes);
    const unused = own === undefined ? undefined : this.#allocateFromUnused(slotBytes);
    if (unused !== undefined) return unused;
    const ownBytes = this.#allocator.slabBytesOf(slotBytes);
    const share = this.#allocator.capacityBytes / (this.#allocator.sizeCount + (ownBytes > 0 ? 0 : 1));
    const isBelowShare = ownBytes + this.#allocator.chunkBytes <= share;
    if (own !== undefined && !isBelowShare) {
      this.#evict(own);
      return this.#allocator.allocate(slotBytes);
    }
    const others = [...this.#classes.sizes()]
      .filter((size) => size !== slotBytes && this.#classes.mayYield(size) && this.#allocator.hasIdleSlab(size))
      .map((size) => ({ size, coldest: this.#coldest(size), isAbove: this.#allocator.slabBytesOf(size) > share }))
      .filter(({ coldest }) => coldest !== undefined)
      .sort((a, b) => a.coldest!.usedUs - b.coldest!.usedUs);
    for (const { size, coldest, isAbove } of others) {
      // Growth at another's cost only where that evens things out, and what goes was used before what one has oneself.
      if (own !== undefined && !(isAbove && coldest!.usedUs < own.usedUs)) continue;
      const slot = this.#takeSlabs(slotBytes, size);
      if (slot !== undefined) return slot;
    }
    if (own !== undefined) {
      this.#evict(own);
      return this.#allocator.allocate(slotBytes);
    }
    // A slot longer than the slabs of one size: neighbours of several sizes have to go.
    return this.#takeRun(slotBytes);
  }

  /** In the place of a size that would keep its slabs for ever where all others are at their shares. */
  #allocateFromUnused(slotBytes: number): number | undefined {
    const { capacityBytes } = this.#allocator;
    for (const size of this.#classes.unused(capacityBytes, (each) => this.#allocator.slabBytesOf(each) > 0)) {
      const slot = size === slotBytes ? undefined : this.#takeSlabs(slotBytes, size);
      if (slot !== undefined) return slot;
    }
    return undefined;
  }

  /** To look for a victim takes long where nothing may go: again only if others have let go of something that helps. */
  #allocateByAsking(slotBytes: number): number | undefined {
    this.#loosened.clear();
    for (let asked = 0; asked < roomAsks && this.#makeRoom(); asked++) {
      let slot = this.#allocator.allocate(slotBytes); // a removed block's last unpin frees its slot at once
      if (slot === undefined && this.#loosened.delete(slotBytes)) slot = this.#allocateByEviction(slotBytes);
      if (slot !== undefined) return slot;
    }
    return this.#loosened.size > 0 ? this.#allocateByEviction(slotBytes) : undefined; // slabs of other sizes, perhaps
  }

  #coldest(slotBytes: number): E | undefined {
    return this.#classes.get(slotBytes)?.coldest();
  }

  /** Empty slabs of `other`, coldest first, until a slot of `slotBytes` fits. */
  #takeSlabs(slotBytes: number, other: number): number | undefined {
    if (slotBytes > this.#allocator.chunkBytes && this.#allocator.slabSpanOf(other) < slotBytes) return undefined;
    while (this.#allocator.hasIdleSlab(other)) {
      const slab = this.#coldestIdleSlab(other);
      if (slab === undefined) {
        this.#classes.stuck(other);
        return undefined;
      }
      for (const entry of slab) this.#evict(entry);
      const slot = this.#allocator.allocate(slotBytes);
      if (slot !== undefined) return slot;
    }
    return undefined;
  }

  /** Empty the run of slabs, of whatever sizes, that costs the fewest bytes and has nothing in use. */
  #takeRun(slotBytes: number): number | undefined {
    const run = this.#allocator.cheapestRun(slotBytes);
    if (run === undefined) return undefined;
    for (const slot of run) this.#evict(this.#entryAt(slot));
    return this.#allocator.allocate(slotBytes);
  }

  /** All blocks of the slab that holds the coldest block of this size; none where each has one that goes after a child elsewhere. */
  #coldestIdleSlab(slotBytes: number): E[] | undefined {
    const coldest = this.#classes.get(slotBytes)!.coldestOf(({ slot }) => this.#allocator.isSlabIdle(slot));
    return coldest && this.#allocator.neighbours(coldest.slot).map((slot) => this.#entryAt(slot));
  }
}

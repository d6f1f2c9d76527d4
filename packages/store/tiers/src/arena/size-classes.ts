/**
 * The blocks of an arena by slot size, for eviction looks among those first that can take each other's place; and which sizes are of no
 * use to anybody any more.
 *
 * A size is unused when no block of it came or was used while others filled a whole arena. It is told by what came and not by time, as
 * layouts may pause for a night, and by no order of eviction, as not each policy takes the oldest first.
 */
import type { Ranked, SizeClass } from './size-class.ts';

interface Row<E extends Ranked> {
  readonly sizeClass: SizeClass<E>;
  /** `#publishedBytes` at its last use. */
  usedAtBytes: number;
}

export class SizeClasses<E extends Ranked> {
  readonly #make: (slotBytes: number) => SizeClass<E>;
  /** The one whose blocks nobody has used for longest comes first. */
  readonly #rows = new Map<number, Row<E>>();
  #latest: Row<E> | undefined;
  #publishedBytes = 0;
  /** Sizes of which no slab could be emptied as its blocks go after their children elsewhere, until something of theirs is let go of. */
  readonly #stuck = new Set<number>();

  constructor(make: (slotBytes: number) => SizeClass<E>) {
    this.#make = make;
  }

  /** Of all blocks that ever came. */
  get publishedBytes(): number {
    return this.#publishedBytes;
  }

  get(slotBytes: number): SizeClass<E> | undefined {
    return this.#rows.get(slotBytes)?.sizeClass;
  }

  sizes(): Iterable<number> {
    return this.#rows.keys();
  }

  *[Symbol.iterator](): Generator<readonly [number, SizeClass<E>]> {
    for (const [slotBytes, { sizeClass }] of this.#rows) yield [slotBytes, sizeClass];
  }

  /** The class of a block that comes. */
  published(slotBytes: number): SizeClass<E> {
    this.#publishedBytes += slotBytes;
    return this.used(slotBytes);
  }

  /** The class of a block that is used. */
  used(slotBytes: number): SizeClass<E> {
    let row = this.#rows.get(slotBytes);
    if (row === undefined || row !== this.#latest) {
      row ??= { sizeClass: this.#make(slotBytes), usedAtBytes: 0 };
      this.#rows.delete(slotBytes);
      this.#rows.set(slotBytes, row);
      this.#latest = row;
      this.#stuck.delete(slotBytes);
    }
    row.usedAtBytes = this.#publishedBytes;
    return row.sizeClass;
  }

  /** None of its slabs can be emptied now, though in some nothing is in use. */
  stuck(slotBytes: number): void {
    this.#stuck.add(slotBytes);
  }

  /** A slab of it may be looked for. */
  mayYield(slotBytes: number): boolean {
    return !this.#stuck.has(slotBytes);
  }

  /** A slot of it was freed, or one of its blocks is not in use any more. */
  loosened(slotBytes: number): void {
    this.#stuck.delete(slotBytes);
  }

  /** Sizes that are unused in an arena of `capacityBytes`, and not stuck; those that have no slab are forgotten. */
  *unused(capacityBytes: number, hasSlab: (slotBytes: number) => boolean): Generator<number> {
    for (const [slotBytes, { usedAtBytes }] of this.#rows) {
      if (this.#publishedBytes - usedAtBytes < capacityBytes) return;
      if (!hasSlab(slotBytes)) this.#rows.delete(slotBytes);
      else if (this.mayYield(slotBytes)) yield slotBytes;
    }
  }
}

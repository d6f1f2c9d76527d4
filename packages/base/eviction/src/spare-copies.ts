/**
 * Copies of a policy's order, for walks along it that go on while the order changes. A copy is kept for the next walk: fresh memory costs
 * more than what is copied into it.
 */
import type { EntryIndex } from './policy.ts';

type Numbers = Int16Array | Int32Array | Uint8Array | Uint32Array | Float64Array;

/** `source`, in the memory of `target` where that has the room. */
export function copied<T extends Numbers>(target: T, source: T): T {
  if (target.length !== source.length) return source.slice() as T;
  target.set(source);
  return target;
}

export class SpareCopies<T> {
  readonly #make: () => T;
  /** That of the walk that ended last. */
  #spare: T | undefined;

  /** `make`: an empty one. */
  constructor(make: () => T) {
    this.#make = make;
  }

  /** `along` fills the copy and walks along it; whoever breaks off gives it back by that. */
  *walk(along: (copy: T) => Iterable<EntryIndex>): Iterable<EntryIndex> {
    const copy = this.#spare ?? this.#make();
    this.#spare = undefined;
    try {
      yield* along(copy);
    } finally {
      this.#spare = copy;
    }
  }
}

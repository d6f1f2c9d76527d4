/**
 * What is removed while a device is out of service, or is only being listed: none of it may come back with the device.
 *
 * Two ways to say it. By its place, where the device has it listed, or had when it went out. By its name, where it may have a copy that
 * nobody knows of: another device holds the block by now, and removes it. Nothing is written to a device that is out, so that all that
 * it has under such a name is from before the removal.
 *
 * Invariant: no more than `maxRemovedMeanwhile` are remembered; it is said when there are that many, once for each time out of service.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { lifeOf } from './device-contents.ts';
import type { Segment } from './segment.ts';
import type { SegmentPool } from './segment-pool.ts';

/** Places and names, some 20 and some 100 bytes of memory each. */
export const maxRemovedMeanwhile = 1 << 16;

interface Place {
  readonly segment: Segment;
  readonly life: string;
  readonly page: number;
  readonly pages: number;
}

export class RemovedMeanwhile {
  readonly #onFull: () => void;
  /** What a life that ended had removed and not marked yet (`SegmentPool.erasures`), and what was removed after its end. */
  #places = new Map<string, number[]>();
  readonly #names = new Set<string>();
  /** Places and names from after its end. */
  #count = 0;
  /** Removed of what recovery has listed: for the life that it begins. */
  #ofNext: Place[] = [];

  /** `onFull`: others may come back. */
  constructor(onFull: () => void) {
    this.#onFull = onFull;
  }

  /** By the life of its segment (`lifeOf`), page and pages of each object. */
  get places(): ReadonlyMap<string, readonly number[]> {
    return this.#places;
  }

  /** The namespace's key, and the hash. */
  get names(): ReadonlySet<string> {
    return this.#names;
  }

  /** The device went out of service; `unmarked`: what its life had removed and not marked yet. */
  begin(unmarked: Map<string, number[]> | undefined): void {
    this.#places = unmarked ?? this.#places;
    this.#count = 0;
  }

  /** Recovery begins to list. */
  listing(): void {
    this.#ofNext = [];
  }

  addPlace(segment: Segment, page: number, pages: number, isListing: boolean): void {
    if (segment.state === 'free') return;
    const life = lifeOf(segment);
    if (isListing && this.#ofNext.length < maxRemovedMeanwhile) this.#ofNext.push({ segment, life, page, pages });
    if (!this.#mayAdd()) return;
    const others = this.#places.get(life);
    if (others === undefined) this.#places.set(life, [page, pages]);
    else others.push(page, pages);
  }

  addName(namespace: Namespace, hash: HashKey): void {
    const name = namespace.key + hash;
    if (!this.#names.has(name) && this.#mayAdd()) this.#names.add(name);
  }

  /** The device has another folder: nothing that was removed lies there. */
  clear(): void {
    this.#places.clear();
    this.#names.clear();
    this.#count = 0;
  }

  /** The device has a new life, which takes over what is still to be marked. */
  end(pool: SegmentPool): void {
    this.#places.clear();
    this.#names.clear();
    for (const { segment, life, page, pages } of this.#ofNext.splice(0)) {
      if (lifeOf(segment) === life) pool.erase(segment, page, pages); // else it was emptied meanwhile
    }
  }

  #mayAdd(): boolean {
    if (this.#count === maxRemovedMeanwhile) return false;
    if (++this.#count === maxRemovedMeanwhile) this.#onFull();
    return true;
  }
}

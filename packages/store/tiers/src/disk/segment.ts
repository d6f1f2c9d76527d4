/**
 * A segment in memory: a file, where its next object goes, and what of it is listed.
 *
 *     free ──take──▶ open ──▶ full ──last write ends──▶ sealed ──victim──▶ leaving ──▶ free
 *
 * Invariant: `uses` counts reads, writes and metadata writes in flight, and the file is not given a new generation while it
 * is above 0.
 */
import { invariant } from '@kvtier/errors';
import { type EntryNumber, noEntry } from './entry-table.ts';
import { footerBytes, pageBytes } from './format.ts';

/** At most this share of a segment is carried over when it goes, so that eviction always frees space. */
export const reinsertionShare = 0.25;

export class Segment {
  readonly id: number;
  readonly path: string;
  readonly bytes: number;
  /** Number of its device in the tier. */
  readonly device: number;
  /** Number of the file in the I/O queue. */
  readonly file: number;
  generation = 0;
  state: 'free' | 'open' | 'full' | 'sealed' | 'leaving' = 'free';
  tail = pageBytes;
  uses = 0;
  /** Its number in the block index, and there the list of its rows, by place; unlisted ones stay until the segment goes. */
  number = -1;
  first: EntryNumber = noEntry;
  last: EntryNumber = noEntry;
  listedCount = 0;
  /** Whether the file ends with a footer of this generation. */
  hasFooter = false;
  /** A footer of what is listed is due. */
  needsFooter = false;
  /** Removed objects whose headers are still whole in the file: page and pages of each. */
  erased: number[] = [];
  readonly #namespaces = new Set<string>();
  #latestKey = '';
  #placedCount = 0;
  readonly #idleWaiters: (() => void)[] = [];

  constructor(id: number, path: string, bytes: number, device: number, file: number) {
    this.id = id;
    this.path = path;
    this.bytes = bytes;
    this.device = device;
    this.file = file;
  }

  /** Begin a new life. */
  reset(generation: number): void {
    invariant(this.uses === 0 && this.first === noEntry, 'segment: reset while it is used');
    this.generation = generation;
    this.tail = pageBytes;
    this.hasFooter = false;
    this.needsFooter = false;
    this.erased = [];
    this.#placedCount = 0;
    this.#latestKey = '';
    this.#namespaces.clear();
  }

  /** Whether an object of `objectBytes` still fits, with the footer that will name it. */
  hasRoom(namespaceKey: string, objectBytes: number): boolean {
    const namespaceCount = this.#namespaces.size + (this.#namespaces.has(namespaceKey) ? 0 : 1);
    return this.tail + objectBytes + footerBytes(namespaceCount, this.#placedCount + 1) <= this.bytes;
  }

  /** Reserve the space of an object; returns its offset. */
  place(namespaceKey: string, objectBytes: number): number {
    invariant(this.hasRoom(namespaceKey, objectBytes), 'segment: placed beyond its end');
    const offset = this.tail;
    this.tail += objectBytes;
    this.#placedCount++;
    this.#namespaces.add(namespaceKey);
    return offset;
  }

  /** What was placed last, `count` objects from `offset` on, was not written: that space is placed anew. */
  takeBack(offset: number, count: number): void {
    invariant(this.state === 'open' && offset < this.tail, 'segment: what is taken back was not placed last');
    this.tail = offset;
    this.#placedCount -= count;
  }

  /** Count an object that a former life of the process placed, up to `end`. */
  recovered(namespaceKey: string, end: number): void {
    this.#placedCount++;
    if (namespaceKey !== this.#latestKey) this.#namespaces.add(namespaceKey);
    this.#latestKey = namespaceKey;
    this.tail = Math.max(this.tail, end);
  }

  release(): void {
    invariant(this.uses > 0, 'segment: released more often than used');
    if (--this.uses === 0) for (const resume of this.#idleWaiters.splice(0)) resume();
  }

  /** Resolves when nothing is in flight. */
  async idle(): Promise<void> {
    while (this.uses > 0) await new Promise<void>((resolve) => this.#idleWaiters.push(resolve));
  }
}

/** The largest object that a fresh segment of `bytes` holds. */
export function maxObjectBytes(bytes: number): number {
  return bytes - pageBytes - footerBytes(1, 1);
}

/**
 * A segment in memory: a file, where its next object goes, and what of it is listed.
 *
 *     free ──take──▶ open ──▶ full ──last write ends──▶ sealed ──victim──▶ leaving ──▶ free
 *
 * Invariants: `uses` counts reads, writes and metadata writes in flight, and the file is not given a new generation while
 * it is above 0; `useSum` is the sum of `lastUse` over the listed entries.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { imageBytes, pageBytes } from './format.ts';

/** At most this share of a segment is carried over when it goes, so that eviction always frees space. */
export const reinsertionShare = 0.25;

export interface DiskEntry {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly segment: Segment;
  readonly page: number;
  readonly pages: number;
  lastUse: number;
  /** Used since it was written: worth carrying over when its segment goes. */
  hot: boolean;
  listed: boolean;
}

export class Segment {
  readonly id: number;
  readonly path: string;
  readonly bytes: number;
  /** Number of the file in the I/O engine. */
  readonly file: number;
  generation = 0;
  state: 'free' | 'open' | 'full' | 'sealed' | 'leaving' = 'free';
  tail = pageBytes;
  uses = 0;
  /** In order of position; unlisted ones stay until the segment goes. */
  entries: DiskEntry[] = [];
  listedCount = 0;
  useSum = 0;
  readonly #namespaces = new Set<string>();
  #placedCount = 0;
  readonly #idleWaiters: (() => void)[] = [];

  constructor(id: number, path: string, bytes: number, file: number) {
    this.id = id;
    this.path = path;
    this.bytes = bytes;
    this.file = file;
  }

  /** Begin a new life. */
  reset(generation: number): void {
    invariant(this.uses === 0 && this.listedCount === 0, 'segment: reset while it is used');
    this.generation = generation;
    this.tail = pageBytes;
    this.entries = [];
    this.useSum = 0;
    this.#placedCount = 0;
    this.#namespaces.clear();
  }

  /** Whether an object of `objectBytes` still fits, with the footer that will name it. */
  hasRoom(namespaceKey: string, objectBytes: number): boolean {
    const namespaceCount = this.#namespaces.size + (this.#namespaces.has(namespaceKey) ? 0 : 1);
    return this.tail + objectBytes + imageBytes(1, namespaceCount, this.#placedCount + 1) <= this.bytes;
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

  /** Count an object that a former life of the process placed. */
  recovered(namespaceKey: string, end: number): void {
    this.#placedCount++;
    this.#namespaces.add(namespaceKey);
    this.tail = Math.max(this.tail, end);
  }

  /** The coldest segment is that whose blocks were, on average, used longest ago. */
  get meanUse(): number {
    return this.listedCount === 0 ? -1 : this.useSum / this.listedCount;
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
  return bytes - pageBytes - imageBytes(1, 1, 1);
}

/**
 * The files of the disk tier: made, opened for writing, sealed, recycled.
 *
 * Invariants: the sum of file sizes never exceeds `limitBytes` (space is counted before a file is made); a file gets a
 * new generation only when nothing of it is listed and nothing is in flight; one free segment is made ready ahead, so
 * that a writer seldom waits. Region eviction with reinsertion is CacheLib's (navy/block_cache).
 */
import { open, rename, rm } from 'node:fs/promises';
import { join } from 'node:path';
import { invariant, KvError } from '@kvtier/errors';
import { hashOfKey } from '@kvtier/identity';
import { native } from '@kvtier/native';
import type { DiskIo } from './disk-io.ts';
import { encodeImage, encodeSegmentHeader, type IndexImage } from './format.ts';
import { type RecoveredSegment, segmentName, unfinishedSuffix } from './recovery.ts';
import { type DiskEntry, Segment } from './segment.ts';

/** Named steps for tests that stop the process there. */
export type DiskStep =
  | 'disk.segment.prepared'
  | 'disk.segment.opened'
  | 'disk.segment.evicted'
  | 'disk.seal.before'
  | 'disk.seal.after'
  | 'disk.write.submitted'
  | 'disk.write.stored'
  | 'disk.close.checkpoint';

export interface SegmentPoolOptions {
  readonly dir: string;
  readonly limitBytes: number;
  readonly segmentBytes: number;
  readonly io: DiskIo;
  /** Empties a segment of listed blocks, carrying over what is hot. The segment is in state 'leaving'. */
  readonly onEvict: (segment: Segment) => Promise<void>;
  /** An attempt to have a free segment has ended. */
  readonly onRefilled: () => void;
  readonly onFailure: (error: unknown) => void;
  readonly step: (step: DiskStep) => void;
}

export class SegmentPool {
  readonly segments = new Map<number, Segment>();
  /** A segment is being emptied. */
  isRecycling = false;
  readonly #options: SegmentPoolOptions;
  readonly #free: Segment[] = [];
  readonly #background = new Set<Promise<void>>();
  #refilling: Promise<void> | undefined;
  readonly #sealWaiters: (() => void)[] = [];
  #stopped = false;
  #generation = 0;
  #nextId = 1;
  #bytes = 0;

  constructor(options: SegmentPoolOptions) {
    this.#options = options;
  }

  /** Bytes of all segment files, those being made included. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Take over a file of a former life of the process. */
  adopt(found: RecoveredSegment): Segment {
    const path = join(this.#options.dir, segmentName(found.id));
    const segment = this.#register(found.id, path, found.bytes);
    this.#bytes += found.bytes;
    segment.generation = found.generation;
    segment.tail = found.tail;
    if (found.generation > 0) segment.state = 'sealed';
    else this.#free.push(segment);
    this.#generation = Math.max(this.#generation, found.generation);
    return segment;
  }

  /** A segment to write to, with a new generation. Rejects when the world refuses. */
  async take(): Promise<Segment> {
    while (this.#free.length === 0) {
      if (this.#stopped) throw new KvError('IO', `${this.#options.dir}: the disk tier has stopped`);
      await this.#refill();
    }
    const segment = this.#free.pop()!;
    segment.reset(++this.#generation);
    await this.#writeAt(segment, encodeSegmentHeader(segment), 0);
    segment.state = 'open';
    this.#options.step('disk.segment.opened');
    return segment;
  }

  /** Have a free segment ready before it is needed. With `evict` false only as far as there is space. */
  prepareAhead(evict: boolean): void {
    if (this.#free.length > 0 || (!evict && !this.#hasSpace())) return;
    this.#run(this.#refill());
  }

  /** Make sure that at least one file can be made or is there. */
  async ensureUsable(): Promise<void> {
    if (this.segments.size === 0) await this.#refill();
  }

  /** No more objects go into it: its index is written at its end. */
  seal(segment: Segment): void {
    segment.state = 'sealed';
    this.#run(this.#writeFooter(segment));
    for (const resume of this.#sealWaiters.splice(0)) resume();
  }

  /** No more files are made or recycled. */
  stop(): void {
    this.#stopped = true;
    for (const resume of this.#sealWaiters.splice(0)) resume();
  }

  /** Overwrite the header of an object that must not come back. The rest of its first page is of no use any more. */
  erase(entry: DiskEntry, header: Buffer): void {
    if (entry.segment.state === 'free') return;
    this.#run(this.#writeAt(entry.segment, header, entry.page * 4096));
  }

  /** Resolves when no background work is left. */
  async settle(): Promise<void> {
    while (this.#background.size > 0) await Promise.all(this.#background);
  }

  #run(work: Promise<void>): void {
    const watched: Promise<void> = work
      .catch((error: unknown) => this.#options.onFailure(error))
      .finally(() => this.#background.delete(watched));
    this.#background.add(watched);
  }

  #hasSpace(): boolean {
    return this.#bytes + this.#options.segmentBytes <= this.#options.limitBytes;
  }

  #refill(): Promise<void> {
    if (this.#refilling !== undefined) return this.#refilling;
    this.isRecycling = !this.#hasSpace();
    this.#refilling = (this.isRecycling ? this.#recycle() : this.#create()).finally(() => {
      this.#refilling = undefined;
      this.isRecycling = false;
      this.#options.onRefilled();
    });
    return this.#refilling;
  }

  async #create(): Promise<void> {
    const { dir, segmentBytes, step } = this.#options;
    this.#bytes += segmentBytes; // before a byte of it is written
    const id = this.#nextId++;
    const path = join(dir, segmentName(id));
    try {
      await native.prepareFile(path + unfinishedSuffix, segmentBytes);
      await writeAt(path + unfinishedSuffix, encodeSegmentHeader({ id, generation: 0, bytes: segmentBytes }), 0);
      step('disk.segment.prepared');
      await rename(path + unfinishedSuffix, path);
    } catch (error) {
      this.#bytes -= segmentBytes;
      throw error;
    }
    this.#free.push(this.#register(id, path, segmentBytes));
  }

  async #recycle(): Promise<void> {
    let victim = this.#victim();
    while (victim === undefined && !this.#stopped) {
      if (![...this.segments.values()].some(({ state }) => state === 'full')) return; // one single, open segment
      await new Promise<void>((resolve) => this.#sealWaiters.push(resolve)); // full, but its last writes are in flight
      victim = this.#victim();
    }
    if (victim === undefined || this.#stopped) return;
    victim.state = 'leaving';
    await this.#options.onEvict(victim);
    await victim.idle();
    this.#options.step('disk.segment.evicted');
    if (victim.bytes === this.#options.segmentBytes) {
      victim.state = 'free';
      this.#free.push(victim);
    } else await this.#discard(victim); // of a former configuration: its space is used anew
  }

  #victim(): Segment | undefined {
    let coldest: Segment | undefined;
    for (const segment of this.segments.values()) {
      if (segment.state !== 'sealed') continue;
      if (coldest === undefined || segment.meanUse < coldest.meanUse) coldest = segment;
    }
    return coldest;
  }

  /** Delete a segment's file. */
  async #discard(segment: Segment): Promise<void> {
    invariant(segment.listedCount === 0 && segment.uses === 0, 'disk: a segment in use is deleted');
    this.#options.io.closeFile(segment.file);
    this.segments.delete(segment.id);
    await rm(segment.path);
    this.#bytes -= segment.bytes;
  }

  #register(id: number, path: string, bytes: number): Segment {
    const segment = new Segment(id, path, bytes, this.#options.io.openFile(path));
    this.segments.set(id, segment);
    this.#nextId = Math.max(this.#nextId, id + 1);
    return segment;
  }

  async #writeFooter(segment: Segment): Promise<void> {
    segment.uses++;
    try {
      const { id, generation, tail } = segment;
      const image = imageOf([segment], () => ({ id, generation, sealed: true, tail }));
      const footer = encodeImage('footer', image);
      this.#options.step('disk.seal.before');
      await this.#writeAt(segment, footer, segment.bytes - footer.length);
      this.#options.step('disk.seal.after');
    } finally {
      segment.release();
    }
  }

  async #writeAt(segment: Segment, bytes: Buffer, position: number): Promise<void> {
    segment.uses++;
    try {
      await writeAt(segment.path, bytes, position);
    } finally {
      segment.release();
    }
  }
}

/** Metadata goes through the page cache; it is small, and the kernel keeps both views of a file in step. */
async function writeAt(path: string, bytes: Buffer, position: number): Promise<void> {
  const handle = await open(path, 'r+');
  try {
    await handle.write(bytes, 0, bytes.length, position);
  } finally {
    await handle.close();
  }
}

/** The listed blocks of segments as an image for the disk. */
export function imageOf(
  segments: readonly Segment[],
  tailOf: (segment: Segment) => IndexImage['segments'][number],
): IndexImage {
  const numbers = new Map<string, number>();
  const namespaces: Uint8Array[] = [];
  const records: IndexImage['records'][number][] = [];
  for (const [segmentNumber, segment] of segments.entries()) {
    for (const { namespace, hash, page, pages, lastUse, listed } of segment.entries) {
      if (!listed) continue;
      let number = numbers.get(namespace.key);
      if (number === undefined) {
        number = namespaces.push(namespace.digest) - 1;
        numbers.set(namespace.key, number);
      }
      records.push({ namespace: number, hash: hashOfKey(hash), page, pages, lastUse, segment: segmentNumber });
    }
  }
  return { segments: segments.map(tailOf), namespaces, records };
}

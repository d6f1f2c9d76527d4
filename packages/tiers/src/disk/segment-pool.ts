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
import { createPolicy, type EvictionPolicy, type PolicyName } from '@kvtier/eviction';
import { native } from '@kvtier/native';
import type { BlockIndex } from './block-index.ts';
import type { DiskIo } from './disk-io.ts';
import { noEntry } from './entry-table.ts';
import { emptyRecords, encodeFooter, encodeSegmentHeader, pageBytes, record } from './format.ts';
import { type FoundSegment, segmentName, unfinishedSuffix } from './recovery.ts';
import { maxObjectBytes, Segment } from './segment.ts';

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
  /** Number of the device in the tier. */
  readonly device: number;
  readonly limitBytes: number;
  /** Of files that will be made. */
  readonly segmentBytes: number;
  /** Larger ones may be made when a block needs it. */
  readonly mayGrow: boolean;
  readonly io: DiskIo;
  readonly index: BlockIndex;
  /** Chooses the segment that goes. */
  readonly policy: PolicyName;
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
  #segmentBytes: number;
  readonly #policy: EvictionPolicy;
  readonly #options: SegmentPoolOptions;
  readonly #free: Segment[] = [];
  /** With the time at which each began. */
  readonly #background = new Map<Promise<void>, number>();
  #refilling: Promise<void> | undefined;
  readonly #sealWaiters: (() => void)[] = [];
  #stopped = false;
  #broken = false;
  #generation = 0;
  /** The policy's clock. */
  #turn = 0;
  #nextId = 1;
  #bytes = 0;

  constructor(options: SegmentPoolOptions) {
    this.#options = options;
    this.#segmentBytes = options.segmentBytes;
    this.#policy = createPolicy(options.policy);
  }

  /** Bytes of all segment files, those being made included. */
  get bytes(): number {
    return this.#bytes;
  }

  /** When the oldest background work began, of `performance.now()`; Infinity when there is none. */
  get oldestWorkMs(): number {
    return this.#background.size === 0 ? Number.POSITIVE_INFINITY : Math.min(...this.#background.values());
  }

  /** Whether an object of so many bytes fits into a segment; larger segments are made from now on if that is what it takes. */
  accepts(objectBytes: number): boolean {
    if (objectBytes <= maxObjectBytes(this.#segmentBytes)) return true;
    const { limitBytes, mayGrow } = this.#options;
    const largest = Math.floor(limitBytes / 2 / pageBytes) * pageBytes;
    if (!mayGrow || objectBytes > maxObjectBytes(largest)) return false;
    this.#segmentBytes = Math.min(largest, objectBytes * 4);
    return true;
  }

  /** Take over a file of a former life of the process. */
  adopt(found: FoundSegment): Segment {
    const path = join(this.#options.dir, segmentName(found.id));
    const segment = this.#register(found.id, path, found.bytes);
    this.#bytes += found.bytes;
    segment.generation = found.generation;
    if (found.generation > 0) segment.state = 'sealed';
    else this.#free.push(segment);
    const isWhole = found.bytes * 2 <= this.#options.limitBytes;
    if (this.#options.mayGrow && isWhole) this.#segmentBytes = Math.max(this.#segmentBytes, found.bytes);
    this.#generation = Math.max(this.#generation, found.generation);
    return segment;
  }

  /** Segments as the policy takes them, from the first to go. */
  *coldestFirst(): Generator<Segment> {
    for (const id of this.#policy.coldestFirst()) yield this.segments.get(id)!;
  }

  /** Let the policy know a segment of a former life; in the order of their recency. */
  track(segment: Segment): void {
    this.#policy.insert(segment.id, ++this.#turn, { name: segment.generation });
  }

  /** Blocks of it were used. */
  touch(segment: Segment): void {
    if (this.#policy.has(segment.id)) this.#policy.touch(segment.id, ++this.#turn);
  }

  /** A segment to write to, with a new generation. Rejects when the world refuses. */
  async take(): Promise<Segment> {
    for (;;) {
      while (this.#free.length > 0 && this.#free.at(-1)!.bytes < this.#segmentBytes)
        await this.#discard(this.#free.pop()!);
      if (this.#stopped) throw new KvError('IO', `${this.#options.dir}: the disk tier has stopped`);
      if (this.#free.length > 0) break;
      await this.#refill();
    }
    const segment = this.#free.pop()!;
    segment.reset(++this.#generation);
    await this.#writeAt(segment, encodeSegmentHeader(segment), 0);
    segment.state = 'open';
    this.track(segment);
    this.#options.step('disk.segment.opened');
    return segment;
  }

  /** Have a free segment ready before it is needed. With `evict` false only as far as there is space. */
  prepareAhead(evict: boolean): void {
    if (this.#free.length > 0 || (!evict && !this.#hasSpace())) return;
    this.#run(this.#refill());
  }

  /** Make sure that a file can be made, if one is still due; `atLeastOne`: only if there is none at all. */
  async ensureUsable(atLeastOne: boolean): Promise<void> {
    if (this.segments.size === 0 || (!atLeastOne && this.#free.length === 0 && this.#hasSpace())) await this.#refill();
  }

  /**
   * No more objects go into it: its index is written at its end. Not when the device is out of service: nothing is listed
   * then, and a footer that says so would hide what is there from the recovery.
   */
  seal(segment: Segment): void {
    segment.state = 'sealed';
    if (!this.#broken) this.#run(this.#writeFooter(segment));
    for (const resume of this.#sealWaiters.splice(0)) resume();
  }

  /** No more files are made or recycled. `isBroken`: nothing more is written at all. */
  stop(isBroken: boolean): void {
    this.#stopped = true;
    this.#broken ||= isBroken;
    for (const resume of this.#sealWaiters.splice(0)) resume();
  }

  /** Overwrite the header of an object that must not come back, and take it out of the segment's footer. */
  erase(segment: Segment, page: number, header: Buffer): void {
    if (segment.state === 'free') return;
    this.#run(this.#writeAt(segment, header, page * pageBytes).then(() => this.#renewFooter(segment)));
  }

  /** The open segment gets a footer, too: the next start need not walk over its objects. */
  async footOpen(segment: Segment): Promise<void> {
    if (segment.state === 'open' && segment.uses === 0) await this.#writeFooter(segment);
  }

  /** Resolves when no background work is left. */
  async settle(): Promise<void> {
    while (this.#background.size > 0) await Promise.all(this.#background.keys());
  }

  #run(work: Promise<void>): void {
    const watched: Promise<void> = work
      .catch((error: unknown) => this.#options.onFailure(error))
      .finally(() => this.#background.delete(watched));
    this.#background.set(watched, performance.now());
  }

  #hasSpace(): boolean {
    return this.#bytes + this.#segmentBytes <= this.#options.limitBytes;
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
    const { dir, step } = this.#options;
    const segmentBytes = this.#segmentBytes;
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
    this.#options.index.clear(victim);
    this.#options.step('disk.segment.evicted');
    if (victim.bytes === this.#segmentBytes) {
      victim.state = 'free';
      this.#free.push(victim);
    } else await this.#discard(victim); // of a former configuration: its space is used anew
  }

  /** Leaves the policy, too. */
  #victim(): Segment | undefined {
    const id = this.#policy.victim((each) => this.segments.get(each)!.state === 'sealed');
    if (id === undefined) return undefined;
    this.#policy.remove(id);
    return this.segments.get(id)!;
  }

  /** Delete a segment's file. */
  async #discard(segment: Segment): Promise<void> {
    invariant(segment.listedCount === 0 && segment.uses === 0, 'disk: a segment in use is deleted');
    this.#options.io.closeFile(segment.file);
    this.segments.delete(segment.id);
    this.#options.index.unregister(segment);
    await rm(segment.path);
    this.#bytes -= segment.bytes;
  }

  #register(id: number, path: string, bytes: number): Segment {
    const segment = new Segment(id, path, bytes, this.#options.device, this.#options.io.openFile(path));
    this.segments.set(id, segment);
    this.#options.index.register(segment);
    this.#nextId = Math.max(this.#nextId, id + 1);
    return segment;
  }

  /** Of what is listed now; one write of it at a time. */
  async #writeFooter(segment: Segment): Promise<void> {
    segment.uses++;
    segment.footer = 'writing';
    try {
      const sealing = segment.state === 'sealed';
      const footer = footerOf(this.#options.index, segment);
      if (sealing) this.#options.step('disk.seal.before');
      await this.#writeAt(segment, footer, segment.bytes - footer.length);
      if (sealing) this.#options.step('disk.seal.after');
    } finally {
      const isStale = (segment.footer as Segment['footer']) === 'stale';
      segment.footer = 'written';
      segment.release();
      if (isStale) this.#run(this.#renewFooter(segment));
    }
  }

  async #renewFooter(segment: Segment): Promise<void> {
    if (this.#broken) return; // as in `seal`
    if (segment.footer === 'writing') segment.footer = 'stale';
    if (segment.footer === 'written' && (segment.state === 'sealed' || segment.state === 'open')) {
      await this.#writeFooter(segment);
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

/** All before the last listed block is written, so a walk may begin behind it. */
function footerOf(index: BlockIndex, segment: Segment): Buffer {
  const { table } = index;
  const numbers = new Map<number, number>();
  const digests: Uint8Array[] = [];
  const records = emptyRecords(segment.listedCount);
  const { words, doubles } = records;
  let at = 0;
  for (const entry of index.listedOf(segment)) {
    const inIndex = table.namespace(entry);
    let number = numbers.get(inIndex);
    if (number === undefined) {
      number = numbers.size;
      numbers.set(inIndex, number);
      digests.push(index.namespaceOf(entry).digest);
    }
    const hashBytes = table.copyHash(entry, words, at);
    words[at + record.page] = table.page(entry);
    words[at + record.pages] = table.pages(entry);
    words[at + record.namespace] = number;
    words[at + record.kind] = hashBytes | (table.isHot(entry) ? record.hotBit : 0);
    doubles[at / 2 + record.lastUse] = table.lastUse(entry);
    words[at + record.expires] = table.expiresS(entry);
    at += record.words;
  }
  const { id, generation, last } = segment;
  const sealed = segment.state === 'sealed';
  const end = last === noEntry ? pageBytes : (table.page(last) + table.pages(last)) * pageBytes;
  return encodeFooter({ id, generation, sealed, tail: sealed ? segment.tail : end }, digests, records);
}

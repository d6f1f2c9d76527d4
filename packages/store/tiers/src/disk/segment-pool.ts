/**
 * The files of the disk tier: made, opened for writing, sealed, recycled.
 *
 * Invariants: the sum of file sizes never exceeds `limitBytes` (space is counted before a file is made); a file gets a
 * new generation only when nothing of it is listed and nothing is in flight; one free segment is made ready ahead, so
 * that a writer seldom waits; a file system that is full ends none of this, it is tried again. Region eviction with reinsertion is CacheLib's (navy/block_cache).
 */
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { invariant, KvError } from '@kvtier/errors';
import { createPolicy, type EvictionPolicy, type PolicyName } from '@kvtier/eviction';
import type { DeviceFiles } from './device-files.ts';
import type { DiskIndex } from './disk-index.ts';
import type { DiskIo } from './disk-io.ts';
import { isNoSpace, NoSpaceError, type Room } from './file-room.ts';
import { encodeSegmentHeader, pageBytes, type SegmentHeader } from './format.ts';
import type { DiskStep } from './options.ts';
import { type FoundSegment, segmentName, unfinishedSuffix } from './recovery.ts';
import { maxObjectBytes, Segment } from './segment.ts';
import { SegmentChores } from './segment-chores.ts';

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
  readonly files: DeviceFiles;
  /** The longest that making a file may take. */
  readonly prepareLimitMs: number;
  readonly index: DiskIndex;
  /** For more files. */
  readonly room: Room;
  /** For what is written into those that are there. */
  readonly writeRoom: Room;
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
  readonly #background = new Set<Promise<void>>();
  readonly #chores: SegmentChores;
  #refilling: Promise<void> | undefined;
  readonly #sealWaiters: (() => void)[] = [];
  #stopped = false;
  #isUsable = false;
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
    const { index, files, writeRoom, onFailure, step } = options;
    const empty = (segment: Segment): Promise<void> => this.#empty(segment);
    this.#chores = new SegmentChores({ index, files, room: writeRoom, onFailure, step, empty });
  }

  /** Bytes of all segment files, those being made included. */
  get bytes(): number {
    return this.#bytes;
  }

  /** Something of it still waits for the device. */
  get isBusy(): boolean {
    return this.#background.size > 0 || this.#chores.isBusy;
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
  async adopt(found: FoundSegment): Promise<Segment> {
    const path = join(this.#options.dir, segmentName(found.id));
    const segment = await this.#register(found.id, path, found.bytes);
    this.#bytes += found.bytes;
    segment.generation = found.generation;
    if (found.generation > 0) segment.state = 'sealed';
    else this.#free.push(segment);
    const isWhole = found.bytes * 2 <= this.#options.limitBytes;
    if (this.#options.mayGrow && isWhole) this.#segmentBytes = Math.max(this.#segmentBytes, found.bytes);
    this.#generation = Math.max(this.#generation, found.generation);
    return segment;
  }

  /** Nothing was found in it: it is as good as one that was never written. */
  setFree(segment: Segment): void {
    segment.state = 'free';
    this.#free.push(segment);
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

  /** A segment to write to, with a new generation. Rejects when the world refuses; with `isNoSpace`, it is worth another try. */
  async take(): Promise<Segment> {
    for (;;) {
      while (this.#free.length > 0 && this.#free.at(-1)!.bytes < this.#segmentBytes)
        await this.#discard(this.#free.pop()!);
      if (this.#stopped) throw new KvError('IO', `${this.#options.dir}: the disk tier has stopped`);
      if (this.#free.length > 0) break;
      const earlier = this.#refilling;
      const bytes = this.#bytes;
      await this.#refill(true);
      if (earlier !== undefined || this.#free.length > 0 || this.#hasSpace() || this.#stopped) continue;
      const { dir, room } = this.#options;
      if (room.isFull) throw new NoSpaceError(dir);
      if (this.#bytes < bytes) continue; // a smaller one went: so many of them have to that one of the new size fits
      if (this.segments.size > 0) throw new KvError('IO', `${dir}: no segment can be written to, and none can be made`);
    }
    const segment = this.#free.pop()!;
    try {
      await this.#renew(segment);
    } catch (error) {
      this.#free.push(segment);
      throw error;
    }
    segment.state = 'open';
    this.track(segment);
    this.#options.step('disk.segment.opened');
    return segment;
  }

  /** Have a free segment ready before it is needed. With `evict` false only as far as there is space. */
  prepareAhead(evict: boolean): void {
    if (this.#free.length > 0 || (!evict && !this.#hasSpace())) return;
    this.#run(this.#refill(evict));
  }

  /** Make sure that a file can be made, if one is still due; `atLeastOne`: only if there is none at all. */
  async ensureUsable(atLeastOne: boolean): Promise<void> {
    if (this.segments.size === 0 || (!atLeastOne && this.#free.length === 0 && this.#hasSpace()))
      await this.#refill(false);
    this.#isUsable = true;
  }

  /**
   * No more objects go into it: its index is written at its end. Not when the device is out of service: nothing is listed
   * then, and a footer that says so would hide what is there from the recovery.
   */
  seal(segment: Segment): void {
    segment.state = 'sealed';
    if (!this.#broken) this.#chores.foot(segment);
    this.#wake();
  }

  /** No more files are made or recycled. `isBroken`: nothing more is written at all. */
  stop(isBroken: boolean): void {
    this.#stopped = true;
    this.#broken ||= isBroken;
    if (isBroken) this.#chores.stop();
    this.#wake();
  }

  /** An object must not come back: its header will be overwritten, and the segment's footer written without it. */
  erase(segment: Segment, page: number, pages: number): void {
    this.#chores.erase(segment, page, pages);
  }

  /** Objects of a former life of the device, as `erasures` said. `needsFooter`: others must not come back either, and are not marked. */
  eraseAgain(segment: Segment, erased: readonly number[], needsFooter: boolean): void {
    segment.erased = [...erased];
    segment.needsFooter = needsFooter;
    this.#chores.eraseLater(segment);
  }

  /** What is removed and not marked in its file yet: page and pages of each object, by id and generation of its segment. */
  erasures(): Map<string, number[]> {
    const all = new Map<string, number[]>();
    for (const { id, generation, erased } of this.segments.values())
      if (erased.length > 0) all.set(`${id}:${generation}`, [...erased]);
    return all;
  }

  /** The open segment gets a footer, too: the next start need not walk over its objects. */
  async footOpen(segment: Segment): Promise<void> {
    if (segment.state === 'open' && segment.uses === 0 && segment.erased.length === 0)
      await this.#chores.writeFooter(segment);
  }

  /** Deletes the files of segments whose removed objects could not be marked: a start must not list them. */
  async removeUnmarked(): Promise<void> {
    const { files } = this.#options;
    for (const { path, erased } of this.segments.values())
      if (erased.length > 0) await files.run((handle) => native.fileRemove(handle, path));
  }

  /** Resolves when no background work is left. */
  async settle(): Promise<void> {
    do {
      await Promise.all(this.#background);
      await this.#chores.settle();
    } while (this.#background.size > 0);
  }

  #run(work: Promise<void>): void {
    const watched: Promise<void> = work
      .catch((error: unknown) => {
        if (!isNoSpace(error)) this.#options.onFailure(error); // else whoever needs a segment asks again
      })
      .finally(() => this.#background.delete(watched));
    this.#background.add(watched);
  }

  #wake(): void {
    for (const resume of this.#sealWaiters.splice(0)) resume();
  }

  #hasSpace(): boolean {
    return this.#bytes + this.#segmentBytes <= this.#options.limitBytes && this.#options.room.isLikely;
  }

  /** `evict`: a segment may be emptied for it. */
  #refill(evict: boolean): Promise<void> {
    if (this.#refilling !== undefined) return this.#refilling;
    this.isRecycling = !this.#hasSpace();
    this.#refilling = (this.isRecycling ? this.#recycle() : this.#createOrRecycle(evict)).finally(() => {
      this.#refilling = undefined;
      this.isRecycling = false;
      this.#options.onRefilled();
    });
    return this.#refilling;
  }

  /** A file system that is full ends the making of files and nothing else, if there are any. */
  async #createOrRecycle(evict: boolean): Promise<void> {
    const { room } = this.#options;
    try {
      await this.#create();
      room.told(false);
    } catch (error) {
      if (!isNoSpace(error)) throw error;
      if (this.#isUsable || this.segments.size > 0) room.told(true); // else the start fails, and says why
      if (this.segments.size === 0) throw error;
      if (!evict) return;
      this.isRecycling = true;
      await this.#recycle();
    }
  }

  async #create(): Promise<void> {
    const { dir, files, prepareLimitMs, step } = this.#options;
    const segmentBytes = this.#segmentBytes;
    this.#bytes += segmentBytes; // before a byte of it is written
    const id = this.#nextId++;
    const path = join(dir, segmentName(id));
    const unfinished = path + unfinishedSuffix;
    let isMade = false;
    try {
      await files.run((handle) => native.filePrepare(handle, unfinished, segmentBytes), prepareLimitMs);
      isMade = true;
      await this.#writeHeader(unfinished, { id, generation: 0, bytes: segmentBytes });
      step('disk.segment.prepared');
      await files.run((handle) => native.fileRename(handle, unfinished, path));
    } catch (error) {
      // What was made, if anything, goes before its space is counted as free; if not even that works, the next start does it.
      if (isMade) await files.run((handle) => native.fileRemove(handle, unfinished)).catch(() => {});
      this.#bytes -= segmentBytes;
      throw error;
    }
    this.#free.push(await this.#register(id, path, segmentBytes));
  }

  async #recycle(): Promise<void> {
    let victim = this.#victim();
    while (victim === undefined && !this.#stopped) {
      // Full, but its last writes are in flight; or being emptied already.
      const isComing = ({ state }: Segment): boolean => state === 'full' || state === 'leaving';
      if (this.#free.length > 0 || ![...this.segments.values()].some(isComing)) return; // one single, open segment
      await new Promise<void>((resolve) => this.#sealWaiters.push(resolve));
      victim = this.#victim();
    }
    if (victim === undefined || this.#stopped) return;
    victim.state = 'leaving';
    await this.#options.onEvict(victim);
    await victim.idle();
    this.#options.index.clear(victim);
    // Its copies are not known any more: what is removed from now on would come back from here after a crash.
    if (!(await this.#renewOrDiscard(victim))) return;
    this.#options.step('disk.segment.evicted');
    if (victim.bytes === this.#segmentBytes) this.setFree(victim);
    else await this.#discard(victim); // of a former configuration: its space is used anew
  }

  /** All of a sealed segment was removed: a new generation is shorter than so many marks. */
  async #empty(segment: Segment): Promise<void> {
    segment.state = 'leaving';
    this.#policy.remove(segment.id);
    await segment.idle();
    this.#options.index.clear(segment);
    if (await this.#renewOrDiscard(segment)) this.setFree(segment);
    this.#wake();
    this.#options.onRefilled();
  }

  /** A new generation, first in the file: from then on nothing that it held is listed by a start. */
  async #renew(segment: Segment): Promise<void> {
    const generation = ++this.#generation;
    segment.uses++;
    try {
      await this.#writeHeader(segment.path, { id: segment.id, generation, bytes: segment.bytes });
    } finally {
      segment.release();
    }
    segment.reset(generation);
  }

  /** False: the file system has no space for its new header, so that the file is gone. */
  async #renewOrDiscard(segment: Segment): Promise<boolean> {
    try {
      await this.#renew(segment);
      return true;
    } catch (error) {
      if (!isNoSpace(error)) throw error;
      this.#options.writeRoom.told(true);
      await this.#discard(segment);
      return false;
    }
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
    const { files, io, index, room } = this.#options;
    io.closeFile(files, segment.file);
    this.segments.delete(segment.id);
    index.unregister(segment);
    await files.run((handle) => native.fileRemove(handle, segment.path));
    this.#bytes -= segment.bytes;
    room.freed();
  }

  async #register(id: number, path: string, bytes: number): Promise<Segment> {
    const { device, files, io, index } = this.#options;
    const segment = new Segment(id, path, bytes, device, await io.openFile(files, path));
    this.segments.set(id, segment);
    index.register(segment);
    this.#nextId = Math.max(this.#nextId, id + 1);
    return segment;
  }

  /** Through the page cache: it is small, and the kernel keeps both views of a file in step. */
  #writeHeader(path: string, header: SegmentHeader): Promise<void> {
    const page = encodeSegmentHeader(header);
    return this.#options.files.run((files) => native.fileWrite(files, path, Float64Array.of(0), page));
  }
}

/**
 * The write side: objects are placed one behind the other in the open segment, written in any order, and listed in the
 * order of their places.
 *
 *     jobs ──place──▶ in flight ──written──▶ (all before it written?) ──▶ stored
 *
 * Invariants: 'stored' is said only when everything before it in the segment is written, so that the walk over headers
 * that recovers an unsealed segment finds it; at most `maxPendingBytes` wait or are in flight. What a full file system refused to
 * take leaves a hole: at the end of the segment it is placed anew, else it is marked as a removed object, for that walk to step
 * over. Until there is space again writes are refused, one at a time is tried, and no segment is emptied for them in vain.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { DiskIndex } from './disk-index.ts';
import { type DiskIo, type ObjectRow, timedOut } from './disk-io.ts';
import { isNoSpace, isNoSpaceErrno, type Room } from './file-room.ts';
import { pageBytes } from './format.ts';
import type { DiskStep } from './options.ts';
import { reinsertionShare, type Segment } from './segment.ts';
import type { SegmentPool } from './segment-pool.ts';

export interface WriteJob {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly slot: number;
  readonly bytes: number;
  /** Recency to keep; undefined: it is new. */
  readonly lastUse: number | undefined;
  /** The end of the object (`Header.expiresS`). */
  readonly expiresS: number;
  /** Asked when it has been written: false, and it is not listed, but marked as removed. */
  readonly wanted?: () => boolean;
  readonly onDone: (stored: boolean) => void;
}

interface Waiting {
  readonly job: WriteJob;
  readonly startMs: number;
}

interface Placed {
  readonly job: WriteJob;
  readonly offset: number;
  written: boolean;
  /** The file system had no space for it. */
  isHole: boolean;
}

/** What of a segment is in flight. */
interface InFlight {
  /** The first that has not ended. */
  first: number;
  /** In order of places. */
  readonly placed: Placed[];
  /** Behind the last one that was written. */
  holes: Placed[];
}

export interface AppenderOptions {
  readonly pool: SegmentPool;
  readonly index: DiskIndex;
  readonly io: DiskIo;
  readonly room: Room;
  readonly maxPendingBytes: number;
  /** The clock by which jobs have waited too long. */
  readonly nowMs: () => number;
  /** The segment that a former life left open. */
  readonly open: Segment | undefined;
  readonly onFailure: (error: unknown) => void;
  readonly step: (step: DiskStep) => void;
}

export class Appender {
  readonly #options: AppenderOptions;
  #open: Segment | undefined;
  #queue: Waiting[] = [];
  readonly #inFlight = new Map<Segment, InFlight>();
  #pendingBytes = 0;
  #switching = false;
  #stopped = false;
  readonly #idleWaiters: (() => void)[] = [];

  constructor(options: AppenderOptions) {
    this.#options = options;
    this.#open = options.open;
  }

  /** Whether `bytes` more may wait. */
  hasRoom(bytes: number): boolean {
    const { room } = this.#options;
    if (room.isFull && (!room.isLikely || this.#pendingBytes > 0)) return false;
    return this.#pendingBytes + bytes <= this.#options.maxPendingBytes;
  }

  /** Queue jobs; the caller has asked `hasRoom`. */
  append(jobs: readonly WriteJob[]): void {
    const { pool, room, nowMs } = this.#options;
    // One shows whether there is space again.
    const taken = this.#stopped ? 0 : room.isFull ? 1 : jobs.length;
    if (taken > 0 && !room.isFull) pool.prepareAhead(true);
    const startMs = nowMs();
    for (const job of jobs.slice(0, taken)) {
      this.#pendingBytes += job.bytes;
      this.#queue.push({ job, startMs });
    }
    for (const job of jobs.slice(taken)) job.onDone(false);
    this.#pump();
  }

  /** A segment has become free, or none had to: what waited for that goes on. */
  resume(): void {
    this.#pump();
  }

  /**
   * Append, ahead of what waits, only what fits into the open segment now; returns how many jobs, from the first on, were
   * taken.
   */
  appendNow(jobs: readonly WriteJob[]): number {
    const segment = this.#open;
    if (segment === undefined || this.#switching || this.#stopped || this.#options.room.isFull) return 0;
    const placed: Placed[] = [];
    for (const job of jobs) {
      if (!segment.hasRoom(job.namespace.key, job.bytes)) break;
      this.#pendingBytes += job.bytes;
      placed.push(this.#place(segment, job));
    }
    this.#submit(segment, placed);
    return placed.length;
  }

  /** Jobs wait or are in flight, or a segment is being changed. */
  get isBusy(): boolean {
    return this.#pendingBytes > 0 || this.#switching;
  }

  /** Bytes that wait or are in flight. */
  get pendingBytes(): number {
    return this.#pendingBytes;
  }

  /** Refuse what has waited for a place since before `sinceMs`. */
  giveUp(sinceMs: number): void {
    const late = this.#queue.filter(({ startMs }) => startMs < sinceMs);
    if (late.length === 0) return;
    this.#queue = this.#queue.filter(({ startMs }) => startMs >= sinceMs);
    for (const { job } of late) this.#end(job, false);
  }

  /** Refuse what waits and what comes; what is in flight ends by itself. */
  stop(): void {
    this.#stopped = true;
    for (const { job } of this.#queue.splice(0)) this.#end(job, false);
  }

  /** Resolves when nothing waits or is in flight. */
  async idle(): Promise<void> {
    while (this.isBusy) {
      await new Promise<void>((resolve) => this.#idleWaiters.push(resolve));
    }
  }

  #pump(): void {
    const { pool } = this.#options;
    let taken = 0;
    let placed: Placed[] = [];
    for (const { job } of this.#queue) {
      if (this.#switching || this.#stopped) break;
      if (this.#open?.hasRoom(job.namespace.key, job.bytes) !== true) {
        if (this.#open !== undefined) this.#submit(this.#open, placed);
        placed = [];
        this.#switch();
        break;
      }
      // Room for what a segment that is being emptied carries over; without a free segment, the end is near anyway.
      const reservedBytes = pool.isRecycling ? this.#open.bytes * reinsertionShare : 0;
      if (!this.#open.hasRoom(job.namespace.key, job.bytes + reservedBytes)) break;
      placed.push(this.#place(this.#open, job));
      taken++;
    }
    this.#queue = this.#queue.slice(taken);
    if (this.#open !== undefined) this.#submit(this.#open, placed);
  }

  #place(segment: Segment, job: WriteJob): Placed {
    segment.uses++;
    const placed = { job, offset: segment.place(job.namespace.key, job.bytes), written: false, isHole: false };
    const inFlight = this.#inFlight.get(segment);
    if (inFlight === undefined) this.#inFlight.set(segment, { first: 0, placed: [placed], holes: [] });
    else inFlight.placed.push(placed);
    return placed;
  }

  #submit(segment: Segment, placed: readonly Placed[]): void {
    if (placed.length === 0) return;
    const sinceMs = this.#options.nowMs();
    const rows = placed.map(
      (each): ObjectRow => ({
        file: segment.file,
        offset: each.offset,
        slot: each.job.slot,
        bytes: each.job.bytes,
        onDone: (result) => this.#written(segment, each, result, sinceMs),
      }),
    );
    this.#options.io.write(
      rows,
      placed.map(() => segment.generation),
    );
    this.#options.step('disk.write.submitted');
  }

  #written(segment: Segment, placed: Placed, result: number, sinceMs: number): void {
    const { room, onFailure } = this.#options;
    placed.written = true;
    placed.isHole = isNoSpaceErrno(-result);
    if (placed.isHole) this.#refuse(sinceMs);
    else if (result === placed.job.bytes) room.told(false, sinceMs);
    else {
      this.#stopped = true;
      const what =
        result === timedOut
          ? 'the device did not answer in time'
          : result < 0
            ? `errno ${-result}`
            : `only ${result} of ${placed.job.bytes} bytes`;
      onFailure(new KvError('IO', `${segment.path}: a write failed (${what})`));
    }
    const inFlight = this.#inFlight.get(segment)!;
    for (; inFlight.placed[inFlight.first]?.written; inFlight.first++) {
      const each = inFlight.placed[inFlight.first]!;
      segment.release();
      if (each.isHole) inFlight.holes.push(each);
      else if (!this.#stopped) this.#list(segment, each, inFlight);
      this.#end(each.job, !this.#stopped && !each.isHole);
    }
    if (inFlight.first < inFlight.placed.length) {
      // Now and then, so that the work stays linear and the list short.
      if (inFlight.first * 2 > inFlight.placed.length && inFlight.first > 1024) {
        inFlight.placed.splice(0, inFlight.first);
        inFlight.first = 0;
      }
      return;
    }
    this.#inFlight.delete(segment);
    const { holes } = inFlight;
    if (holes.length > 0 && segment.state === 'open') segment.takeBack(holes[0]!.offset, holes.length);
    if (segment.state === 'full') this.#options.pool.seal(segment);
  }

  #list(segment: Segment, { job, offset }: Placed, inFlight: InFlight): void {
    const { pool, index, step } = this.#options;
    for (const hole of inFlight.holes) pool.erase(segment, hole.offset / pageBytes, hole.job.bytes / pageBytes);
    inFlight.holes = [];
    if (job.wanted?.() === false) {
      // It lies there whole, and nothing else knows of it: the next walk over the headers would list it.
      pool.erase(segment, offset / pageBytes, job.bytes / pageBytes);
      return;
    }
    index.add(job.namespace, job.hash, segment, offset / pageBytes, job.bytes / pageBytes, job.lastUse, job.expiresS);
    step('disk.write.stored');
  }

  /** The file system has no space: what waits for a place is not kept waiting for it. */
  #refuse(sinceMs: number): void {
    this.#options.room.told(true, sinceMs);
    for (const { job } of this.#queue.splice(0)) this.#end(job, false);
  }

  /** The open segment is full. It is sealed when its last write has ended; another takes its place. */
  #switch(): void {
    const full = this.#open;
    const sinceMs = this.#options.nowMs();
    this.#open = undefined;
    this.#switching = true;
    if (full !== undefined) full.state = 'full';
    if (full !== undefined && !this.#inFlight.has(full)) this.#options.pool.seal(full);
    this.#options.pool
      .take()
      .then(
        (segment) => {
          this.#open = segment;
        },
        (error: unknown) => {
          if (isNoSpace(error)) {
            this.#refuse(sinceMs);
            return;
          }
          this.stop();
          this.#options.onFailure(error);
        },
      )
      .finally(() => {
        this.#switching = false;
        if (this.#open !== undefined) this.#options.pool.prepareAhead(true);
        this.#pump();
        this.#wakeIdle();
      });
  }

  #end(job: WriteJob, stored: boolean): void {
    this.#pendingBytes -= job.bytes;
    job.onDone(stored);
    this.#wakeIdle();
  }

  #wakeIdle(): void {
    if (!this.isBusy) for (const resume of this.#idleWaiters.splice(0)) resume();
  }
}

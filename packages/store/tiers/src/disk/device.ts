/**
 * One device of the disk tier: a folder of segments with an I/O queue, an appender and a budget of its own.
 *
 *     opening ──▶ in service ──ENOSPC, EIO, no answer──▶ out of service ──probe, recovery──▶ in service …
 *
 * Invariants: the bytes of its files never exceed its capacity; while it is out of service nothing of it is listed and no new
 * I/O begins, but for what recovery has listed already: that can be read, as it counts as held; a new life begins only when nothing
 * of the former one is in flight. What is removed meanwhile does not come back with the device. It tries again by itself (retries.ts).
 */
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { invariant, KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { Watch } from '@kvtier/runtime';
import type { ReadStatus } from '../kit/tier.ts';
import type { Appender } from './appender.ts';
import { isBroken, NotMountedError, noFolderFor } from './broken.ts';
import { checkpointEveryMs, writeCheckpoint } from './checkpoint.ts';
import { placeOf } from './device-contents.ts';
import { DeviceFiles } from './device-files.ts';
import { beginLife, type Life } from './device-life.ts';
import type { DiskIndex } from './disk-index.ts';
import { DiskIo, type ObjectRow } from './disk-io.ts';
import type { EntryNumber } from './entry-table.ts';
import { DeviceRoom, isNoSpace } from './file-room.ts';
import { FolderLock } from './folder-lock.ts';
import { type AskIdentity, type FolderMounts, isOnRoot } from './folder-mounts.ts';
import { pageBytes } from './format.ts';
import {
  type DiskPlace,
  type DiskTierOptions,
  defaultCheckpointMs,
  defaultIo,
  defaultRetry,
  defaultTimeoutMs,
  placesOf,
  planCapacity,
} from './options.ts';
import { Patience } from './patience.ts';
import { ForeignSegments, unfinishedSuffix } from './recovery.ts';
import { reinsertHot } from './reinsertion.ts';
import { RemovedMeanwhile } from './removed-meanwhile.ts';
import { Retries } from './retries.ts';
import type { Segment } from './segment.ts';
import type { SegmentPool } from './segment-pool.ts';

/** Places that could not be read, remembered so that they are not listed again. */
const maxBadPlaces = 4096;
const enoent = 2;

export interface DeviceOwner {
  readonly index: DiskIndex;
  readonly mounts: FolderMounts;
  /** Told of it before it lists anything. */
  onMade(device: DiskDevice): void;
  /** What a verified read ended with; a damaged block is forgotten there. */
  onRead(device: DiskDevice, entry: EntryNumber, result: number): ReadStatus;
  onEvicted(entry: EntryNumber): void;
  /** The device is out of service; its blocks are to be dropped. */
  onOut(device: DiskDevice, reason: string): void;
  onBack(device: DiskDevice): void;
}

export class DiskDevice {
  /** In the tier. */
  readonly number: number;
  readonly dir: string;
  readonly capacityBytes: number;
  readonly io: DiskIo;
  /** All other calls to its file system. */
  readonly files: DeviceFiles;
  readonly #room: DeviceRoom;
  readonly #writeRoom: DeviceRoom;
  readonly #options: DiskTierOptions;
  readonly #owner: DeviceOwner;
  readonly #plan: ReturnType<typeof planCapacity>;
  readonly #lock: FolderLock;
  readonly #timeoutMs: number;
  readonly #badPlaces = new Set<string>();
  readonly #removed: RemovedMeanwhile;
  /** Recovery lists what the folder holds. */
  #isListing = false;
  /** Why what recovery lists cannot be a life: a read of it failed meanwhile. */
  #failureOfNext: unknown;
  readonly #watch: Watch;
  #pool: SegmentPool | undefined;
  #life: Life | undefined;
  #reason = 'not open yet';
  readonly #retries: Retries;
  #checkpointing: Promise<void> | undefined;
  #checkpointTick = 0;
  /** Of the last one. */
  #checkpointBytes = 0;
  #checkpointedMs: number;
  #closed = false;

  /**
   * Lock the folder, recover what it holds. KvError CONFIG, LOCKED or IO when it cannot be used. One that is broken, does not answer, or
   * holds another version's segments begins out of service, as one of several that is not mounted: no reason for a node not to start.
   */
  static async open(
    number: number,
    place: DiskPlace,
    options: DiskTierOptions,
    owner: DeviceOwner,
  ): Promise<DiskDevice> {
    const device = new DiskDevice(number, place, options, owner);
    owner.onMade(device);
    try {
      await device.#take();
      device.#begin(await device.#listed(true));
      return device;
    } catch (error) {
      device.#isListing = false;
      const isMissing = error instanceof NotMountedError && placesOf(options).length > 1;
      if (isBroken(error) || isMissing || error instanceof ForeignSegments || device.files.hangs) {
        device.#pool?.stop(true);
        device.#reason = '';
        device.fail(error);
        return device;
      }
      await device.close();
      throw KvError.from(error, 'IO');
    }
  }

  private constructor(number: number, place: DiskPlace, options: DiskTierOptions, owner: DeviceOwner) {
    const { retry = defaultRetry, timeoutMs = defaultTimeoutMs } = options;
    this.number = number;
    this.dir = place.dir;
    this.capacityBytes = place.capacityBytes;
    this.#options = options;
    this.#owner = owner;
    this.#plan = planCapacity(place.capacityBytes, options.segmentBytes);
    this.#timeoutMs = timeoutMs;
    this.#retries = new Retries(() => this.#revive(), retry);
    const tooMany = 'so many blocks were removed while a device was out of service that others may come back';
    this.#removed = new RemovedMeanwhile(() => options.log.warn({ dir: place.dir }, tooMany));
    this.#watch = new Watch(Math.max(10, Math.min(1000, timeoutMs / 8)), (nowMs) => this.#look(nowMs));
    this.#checkpointedMs = this.#watch.nowMs();
    const nowMs = (): number => this.#watch.nowMs();
    this.io = new DiskIo(options.arena, options.slots, { ...defaultIo, ...options.io }, nowMs);
    this.files = new DeviceFiles(place.dir, timeoutMs, nowMs);
    this.#lock = new FolderLock(place.dir, this.files);
    this.#room = new DeviceRoom(place.dir, options.log, retry, nowMs, 'more files');
    this.#writeRoom = new DeviceRoom(place.dir, options.log, retry, nowMs, 'writes');
  }

  get inService(): boolean {
    return this.#reason === '' && !this.#closed;
  }

  /** Out of service, and just about to come back. */
  get isTried(): boolean {
    return this.#retries.trying !== undefined;
  }

  /** What is listed of it can be read. */
  get canRead(): boolean {
    return this.inService || (this.#isListing && !this.#closed);
  }

  /** Why it is out of service; "" when it is not. */
  get reason(): string {
    return this.#reason;
  }

  /** Its file system has no space for more files, or not even for writes into those that it has; it goes on with what it can do. */
  get isFull(): boolean {
    return this.inService && (this.#room.isFull || this.#writeRoom.isFull);
  }

  /** Bytes of all its segment files, those being made included. */
  get bytes(): number {
    return this.#pool?.bytes ?? 0;
  }

  get segments(): Iterable<Segment> {
    return this.#pool?.segments.values() ?? [];
  }

  /** Asked only in service. */
  get appender(): Appender {
    invariant(this.#life !== undefined, 'disk: a device without a life is written to');
    return this.#life.appender;
  }

  /** Whether a segment can hold an object of so many bytes. */
  accepts(objectBytes: number): boolean {
    return this.inService && this.#life!.pool.accepts(objectBytes);
  }

  touch(segment: Segment): void {
    this.#life?.pool.touch(segment);
  }

  read(rows: readonly ObjectRow[], identities: Buffer): void {
    this.io.read(rows, identities);
  }

  /** What was removed must not come back after a restart, nor with a device that is out of service now. */
  erase(segment: Segment, page: number, pages: number): void {
    if (this.inService) this.#life!.pool.erase(segment, page, pages);
    else if (!this.#closed) this.#removed.addPlace(segment, page, pages, this.#isListing);
  }

  /** A block was removed, wherever it was listed: a device that is out of service may have a copy of it from before. */
  eraseCopies(namespace: Namespace, hash: HashKey): void {
    if (!this.inService && !this.#closed) this.#removed.addName(namespace, hash);
  }

  /** A block that the device cannot read: never listed again in this life of its segment. */
  markBad(segment: Segment, page: number): void {
    if (this.#badPlaces.size < maxBadPlaces) this.#badPlaces.add(placeOf(segment, page));
  }

  /** Out of service, once and loudly. The node lives; what was held is a miss until the device is back. */
  fail(error: unknown): void {
    if (this.#isListing) this.#failureOfNext ??= error;
    if (this.#reason !== '' || this.#closed) return;
    this.#reason = KvError.from(error).message;
    const life = this.#life;
    this.#owner.onOut(this, this.#reason);
    life?.appender.stop();
    life?.pool.stop(true);
    this.#removed.begin(life?.pool.erasures());
    const fields = { dir: this.dir, reason: this.#reason, retryMs: this.#retries.failed() };
    this.#options.log.error(fields, 'a device of the disk tier is out of service; it will be tried again');
  }

  checkIntegrity(): void {
    let bytes = 0;
    for (const segment of this.segments) bytes += segment.bytes;
    invariant(bytes <= this.bytes, 'disk: files are larger than accounted');
    invariant(this.bytes + this.#plan.metadataBytes <= this.capacityBytes, 'disk: over its capacity');
  }

  /** Waits for what is in flight, at most for the time limit; leaves a checkpoint. */
  async close(): Promise<void> {
    if (this.#closed) return;
    const patience = new Patience(this.#timeoutMs);
    this.#retries.stop();
    if (this.inService) await patience.wait(this.#life!.appender.idle());
    this.#closed = true;
    this.#life?.appender.stop();
    this.#pool?.stop(false);
    await patience.wait(this.#retries.trying);
    await patience.wait(this.#checkpointing);
    await patience.wait(this.#pool?.settle());
    for (const segment of this.segments) await patience.wait(segment.idle());
    if (this.#reason === '' && !patience.isOver && (await this.#isKept(patience))) {
      await patience.wait(this.#warned(this.#pool!.removeUnmarked()));
      for (const segment of this.segments) await patience.wait(this.#warned(this.#pool!.footOpen(segment)));
      await patience.wait(this.#warned(this.#checkpoint()));
    }
    this.#watch.stop();
    this.#pool?.stop(true);
    await this.io.close();
    this.files.close();
    this.#lock.release();
  }

  /** Else what it held is gone with its folder, and what lies there now is another node's; or it does not say in time. */
  async #isKept(patience: Patience): Promise<boolean> {
    let isOurs: boolean | undefined;
    const asking = this.#lock.isOurs().then((answer) => {
      isOurs = answer;
    });
    await patience.wait(this.#warned(asking));
    if (isOurs === false) this.#tellRemoved();
    return isOurs === true;
  }

  #tellRemoved(): void {
    this.#options.log.info({ dir: this.dir }, 'the folder was removed: nothing of it is left for another start');
  }

  async #warned(work: Promise<void>): Promise<void> {
    await work.catch(async (error: unknown) => {
      if (this.#closed && (await this.#isForeign())) return this.#tellRemoved();
      const { dir } = this;
      this.#options.log.warn(
        { dir, reason: KvError.from(error).message },
        'no checkpoint; recency may be that of before',
      );
    });
  }

  /** The folder was removed, or is another node's; not where that cannot be asked. */
  #isForeign(): Promise<boolean> {
    return this.#lock.isOurs().then(
      (isOurs) => !isOurs,
      () => false,
    );
  }

  /** Look for what has taken too long, and for a checkpoint that is due. */
  #look(nowMs: number): void {
    const sinceMs = nowMs - this.#timeoutMs;
    this.io.giveUp(sinceMs); // those who waited fail the device
    this.files.giveUp();
    this.#life?.appender.giveUp(sinceMs);
    const { checkpointMs = defaultCheckpointMs } = this.#options;
    const isTime = nowMs - this.#checkpointedMs >= checkpointEveryMs(checkpointMs, this.#checkpointBytes);
    const isDue = isTime && this.#owner.index.tick !== this.#checkpointTick;
    if (!this.inService || !isDue || this.#checkpointing !== undefined) return;
    this.#checkpointedMs = nowMs;
    this.#checkpointing = this.#warned(this.#checkpoint()).finally(() => {
      this.#checkpointing = undefined;
    });
  }

  async #revive(): Promise<void> {
    try {
      const isBusy = this.io.inFlightCount > 0 || this.files.openCount > 0 || this.#pool?.isBusy;
      if (isBusy || this.#life?.appender.isBusy) throw new KvError('IO', `${this.dir}: the device still hangs`);
      await this.#probe();
      await this.#owner.index.dropped();
      for (const segment of [...this.segments]) {
        this.io.closeFile(this.files, segment.file);
        this.#owner.index.unregister(segment);
      }
      this.#pool?.segments.clear();
      const life = await this.#listed(false);
      if (this.#closed) return;
      if (this.#failureOfNext !== undefined) {
        life.appender.stop();
        life.pool.stop(true);
        throw this.#failureOfNext;
      }
      this.#begin(life);
      this.#retries.back();
      this.#options.log.warn({ dir: this.dir }, 'a device of the disk tier is back in service');
      this.#owner.onBack(this);
    } catch (error) {
      this.#isListing = false;
      if (this.#closed) return;
      this.#pool?.stop(true); // what it would write says that the blocks that are dropped now are gone
      this.#owner.index.drop(this.segments, false);
      const fields = { dir: this.dir, reason: KvError.from(error).message, retryMs: this.#retries.failedAgain() };
      this.#options.log.warn(fields, 'a device of the disk tier is still out of service');
    }
  }

  /** The folder, locked. @throws NotMountedError: where it would lie is not its disk */
  async #take(): Promise<void> {
    const { dir, files } = this;
    const ask: AskIdentity = (path) => files.run((handle) => native.fileIdentity(handle, path));
    if (this.#lock.wasTaken) await this.#takeAgain();
    else await this.#takeFirst(ask);
    await this.#owner.mounts.keep(dir, ask, this.#options.log);
  }

  /** In this life of the node. */
  async #takeFirst(ask: AskIdentity): Promise<void> {
    const { dir } = this;
    await this.#owner.mounts.check(dir, ask);
    // On a volume of its own all of it is made: that one is mounted.
    const withParents = !(await isOnRoot(dir, ask));
    try {
      await this.files.run((files) => native.fileFolder(files, dir, withParents));
    } catch (error) {
      throw (error as { errno?: number }).errno === enoent ? noFolderFor(dir) : error;
    }
    await this.#lock.take();
  }

  async #takeAgain(): Promise<void> {
    if (await this.#lock.isGone()) await this.files.run((files) => native.fileFolder(files, this.dir, true));
    const isAnother = !(await this.#lock.isOurs());
    await this.#lock.take();
    if (!isAnother) return;
    // Another folder's segments are numbered from 1 on, too.
    this.#badPlaces.clear();
    this.#removed.clear();
  }

  /** One page written to the device itself, once it has answered and its folder is still ours. */
  async #probe(): Promise<void> {
    const path = join(this.dir, `probe${unfinishedSuffix}`);
    await this.files.run((files) => native.fileRemove(files, path));
    await this.#take();
    try {
      await this.files.run((files) => native.filePrepare(files, path, pageBytes));
    } catch (error) {
      if (isNoSpace(error)) return; // it answers, and what it holds can be read
      throw error;
    }
    await this.files.run((files) => native.fileRemove(files, path));
  }

  /** `#recover`, and what comes while it lists is kept: up to `#begin`, or until its caller knows that it failed. */
  #listed(isFirst: boolean): Promise<Life> {
    this.#removed.listing();
    this.#failureOfNext = undefined;
    this.#isListing = true;
    return this.#recover(isFirst);
  }

  /** In service with a new life, from the moment on at which it is not being listed any more. */
  #begin(life: Life): void {
    this.#life = life;
    this.#removed.end(life.pool);
    this.#reason = '';
    this.#isListing = false;
  }

  /** A new life on what the folder holds. `isFirst`: space for one segment will do; else for the one that was not there. */
  #recover(isFirst: boolean): Promise<Life> {
    const { number, dir, io, files } = this;
    return beginLife({
      ...{ number, dir, io, files, index: this.#owner.index, options: this.#options, plan: this.#plan, isFirst },
      ...{ room: this.#room, writeRoom: this.#writeRoom, timeoutMs: this.#timeoutMs, nowMs: () => this.#watch.nowMs() },
      ...{ erased: this.#removed.places, removed: this.#removed.names, badPlaces: this.#badPlaces },
      onPool: (pool) => {
        this.#pool = pool;
      },
      onEvict: (segment) => this.#evict(segment),
      onRefilled: () => this.#life?.appender.resume(),
      onFailure: (error) => this.fail(error),
    });
  }

  async #evict(segment: Segment): Promise<void> {
    const { index } = this.#owner;
    await reinsertHot(segment, {
      slots: this.#options.slots,
      index,
      io: this.io,
      appender: this.appender,
      onRead: (entry, result) => this.#owner.onRead(this, entry, result),
    });
    for (const entry of index.listedOf(segment)) this.#owner.onEvicted(entry);
  }

  /** @throws KvError IO */
  async #checkpoint(): Promise<void> {
    const { dir, files } = this;
    const { metadataBytes } = this.#plan;
    const { onStep = () => {} } = this.#options;
    const written = await writeCheckpoint(this.#pool!, {
      dir,
      files,
      index: this.#owner.index,
      metadataBytes,
      step: onStep,
    });
    if (written === undefined) return;
    this.#checkpointTick = written.tick;
    this.#checkpointBytes = written.bytes;
  }
}

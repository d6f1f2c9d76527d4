/**
 * The disk tier: a log of objects in preallocated segment files, written and read by the native engine with O_DIRECT.
 *
 *     write ──Appender──▶ open segment ──▶ sealed ──evict──▶ recycled under a new generation
 *     read  ──BlockIndex──▶ segment, page ──▶ verified in native code ──▶ arena slot
 *
 * Invariants (law 1, 3): what is delivered was verified against namespace, hash, length and both checksums; the bytes of
 * all files together never exceed `capacityBytes`; a tier that the world broke goes out of service and says so once.
 * Idea: log-structured region caches (CacheLib's BlockCache, TAO's SSD tier).
 */
import { mkdir, rename, rm, writeFile } from 'node:fs/promises';
import { join } from 'node:path';
import { invariant, KvError } from '@kvtier/errors';
import { encodeHeader, type HashKey, headerBytes, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import { native } from '@kvtier/native';
import type { ReadStatus, SlotBlock, Tier, TierChange, TierStats, WriteStatus } from '../tier.ts';
import { Appender, type WriteJob } from './appender.ts';
import { BlockIndex } from './block-index.ts';
import { badMessage, DiskIo, identitiesOf, type ObjectRow, placeOf } from './disk-io.ts';
import { encodeImage, imageBytes, pageBytes } from './format.ts';
import { type DiskTierOptions, defaultIo, defaultMaxPendingBytes, planCapacity } from './options.ts';
import { checkpointName, type RecoveredSegment, recoverSegments, segmentName, unfinishedSuffix } from './recovery.ts';
import { reinsertHot } from './reinsertion.ts';
import { type DiskEntry, maxObjectBytes, type Segment } from './segment.ts';
import { imageOf, SegmentPool } from './segment-pool.ts';

/** A namespace that no engine has: marks an erased object, so that a walk over the headers can step over it. */
const erasedNamespace = new Uint8Array(32);

export class DiskTier implements Tier {
  readonly name = 'disk';
  readonly supports = { persistent: true, shared: false, writable: true, evicts: true };
  readonly #options: DiskTierOptions;
  readonly #io: DiskIo;
  readonly #lock: number;
  readonly #index = new BlockIndex();
  readonly #pool: SegmentPool;
  /** Made when recovery has ended. */
  #appender!: Appender;
  /** Writes in flight by namespace and hash, with who else waits for them: one block is not written twice. */
  readonly #writing = new Map<string, ((stored: boolean) => void)[]>();
  readonly #metadataBytes: number;
  readonly #segmentBytes: number;
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };
  #outOfServiceReason = '';
  #closed = false;

  /** Lock the folder, recover what it holds. KvError CONFIG, LOCKED or IO when it cannot be used. */
  static async open(options: DiskTierOptions): Promise<DiskTier> {
    const plan = planCapacity(options.capacityBytes, options.segmentBytes);
    let lock: number;
    try {
      await mkdir(options.dir, { recursive: true, mode: 0o700 });
      lock = native.lockFile(join(options.dir, 'lock'));
    } catch (error) {
      throw KvError.from(error, 'IO');
    }
    let tier: DiskTier | undefined;
    try {
      tier = new DiskTier(options, plan, lock);
      await tier.#recover(plan.limitBytes);
      return tier;
    } catch (error) {
      if (tier !== undefined) await tier.#io.close();
      native.unlock(lock);
      throw KvError.from(error, 'IO');
    }
  }

  private constructor(options: DiskTierOptions, plan: ReturnType<typeof planCapacity>, lock: number) {
    this.#options = options;
    this.#lock = lock;
    this.#metadataBytes = plan.metadataBytes;
    this.#segmentBytes = plan.segmentBytes;
    this.#io = new DiskIo(options.arena, { ...defaultIo, ...options.io });
    this.#pool = new SegmentPool({
      dir: options.dir,
      limitBytes: plan.limitBytes,
      segmentBytes: plan.segmentBytes,
      io: this.#io,
      onEvict: (segment) => this.#evict(segment),
      onRefilled: () => this.#appender?.resume(),
      onFailure: (error) => this.#fail(error),
      step: (step) => options.onStep?.(step),
    });
  }

  /** Which I/O backend serves the tier, and why not io_uring ("" if it does). */
  get ioBackend(): { backend: 'io_uring' | 'threads'; reason: string } {
    return this.#io.backend;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const blocks = this.#inService ? this.#index.of(namespace) : undefined;
    let held = 0;
    while (held < hashes.length && blocks?.has(hashes[held]!)) held++;
    this.#counts.hits += held;
    if (held < hashes.length) this.#counts.misses++;
    return held;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (let at = hashes.length - 1; at >= 0; at--) {
      const entry = this.#index.get(namespace, hashes[at]!);
      if (entry !== undefined) this.#index.touch(entry);
    }
  }

  write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const names = blocks.map(({ hash }) => hash);
    const slots = Float64Array.from(blocks, ({ slot }) => slot);
    const sizes = native.arenaObjects(this.#options.arena, slots, identitiesOf(namespace, names));
    return new Promise((resolve) => {
      const statuses: WriteStatus[] = [];
      const jobs: WriteJob[] = [];
      let open = blocks.length;
      let waitingBytes = 0;
      const end = (index: number, status: WriteStatus): void => {
        if (status === 'refused') this.#counts.refused++;
        statuses[index] = status;
        if (--open === 0) resolve(statuses);
      };
      for (const [index, { hash, slot }] of blocks.entries()) {
        const bytes = sizes[index]!;
        const entry = this.#index.get(namespace, hash);
        const key = namespace.key + hash;
        const others = this.#writing.get(key);
        const fits = bytes > 0 && bytes <= maxObjectBytes(this.#segmentBytes);
        if (!this.#inService) end(index, 'refused');
        else if (entry !== undefined) {
          this.#index.touch(entry);
          end(index, 'held');
        } else if (others !== undefined) others.push((stored) => end(index, stored ? 'held' : 'refused'));
        else if (!fits || !this.#appender.hasRoom(waitingBytes + bytes)) end(index, 'refused');
        else {
          waitingBytes += bytes;
          const waiters: ((stored: boolean) => void)[] = [];
          this.#writing.set(key, waiters);
          const onDone = (stored: boolean): void => {
            this.#writing.delete(key);
            end(index, stored ? 'stored' : 'refused');
            for (const tell of waiters) tell(stored);
          };
          jobs.push({ namespace, hash, slot, bytes, lastUse: undefined, onDone });
        }
      }
      this.#appender.append(jobs);
      if (blocks.length === 0) resolve(statuses);
    });
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    const found: { index: number; slot: number; entry: DiskEntry }[] = [];
    for (const [index, { hash, slot }] of blocks.entries()) {
      const entry = this.#inService ? this.#index.get(namespace, hash) : undefined;
      if (entry === undefined) onDone(index, 'missing');
      else if (entry.pages * pageBytes > this.#options.slots.slotBytesOf(slot)) {
        this.#forget(entry, 'corrupt'); // an object of another size than its namespace has: never into this slot
        onDone(index, 'corrupt');
      } else found.push({ index, slot, entry });
    }
    if (found.length === 0) return;
    // Neighbours in a file travel as one I/O.
    found.sort((a, b) => a.entry.segment.id - b.entry.segment.id || a.entry.page - b.entry.page);
    await new Promise<void>((resolve) => {
      let open = found.length;
      const rows = found.map(({ index, slot, entry }): ObjectRow => {
        entry.segment.uses++;
        return {
          ...placeOf(entry),
          slot,
          onDone: (result) => {
            entry.segment.release();
            onDone(index, this.#readEnded(entry, result));
            if (--open === 0) resolve();
          },
        };
      });
      this.#io.read(
        rows,
        identitiesOf(
          namespace,
          found.map(({ entry }) => entry.hash),
        ),
      );
    });
  }

  /** What was removed as corrupt, or because it was asked for, does not come back after a restart. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: 'corrupt' | 'evicted' | 'asked'): number {
    let count = 0;
    for (const hash of hashes) {
      const entry = this.#index.get(namespace, hash);
      if (entry === undefined) continue;
      this.#forget(entry, reason);
      count++;
      if (reason !== 'evicted' && this.#inService) this.#erase(entry);
    }
    return count;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#index.follow(listener);
  }

  stats(): TierStats {
    return {
      tier: this.name,
      blocks: this.#inService ? this.#index.count : 0,
      bytes: this.#pool.bytes,
      capacityBytes: this.#options.capacityBytes,
      ...this.#counts,
      inService: this.#inService,
      outOfServiceReason: this.#outOfServiceReason,
    };
  }

  checkIntegrity(): void {
    this.#index.checkIntegrity(this.#pool.segments.values());
    let bytes = 0;
    for (const segment of this.#pool.segments.values()) bytes += segment.bytes;
    invariant(bytes <= this.#pool.bytes, 'disk: files are larger than accounted');
    invariant(this.#pool.bytes + this.#metadataBytes <= this.#options.capacityBytes, 'disk: over its capacity');
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    await this.#appender.idle();
    this.#closed = true;
    this.#appender.stop();
    this.#pool.stop();
    await this.#pool.settle();
    for (const segment of this.#pool.segments.values()) await segment.idle();
    if (this.#outOfServiceReason === '') {
      await this.#checkpoint().catch((error: unknown) => {
        const reason = KvError.from(error).message;
        this.#options.log.warn({ reason }, 'no checkpoint; the next start reads the segments');
      });
    }
    await this.#io.close();
    native.unlock(this.#lock);
  }

  get #inService(): boolean {
    return this.#outOfServiceReason === '' && !this.#closed;
  }

  /** Out of service, once and loudly. The node lives; what was held is a miss from now on. */
  #fail(error: unknown): void {
    if (this.#outOfServiceReason !== '') return;
    this.#outOfServiceReason = KvError.from(error).message;
    this.#index.hide();
    this.#appender?.stop();
    this.#pool.stop();
    const fields = { tier: this.name, dir: this.#options.dir, reason: this.#outOfServiceReason };
    this.#options.log.error(fields, 'the disk tier is out of service until the next start');
    this.#options.onOutOfService?.(this.#outOfServiceReason);
  }

  #readEnded(entry: DiskEntry, result: number): ReadStatus {
    if (result === entry.pages * pageBytes) return 'ready';
    if (result === badMessage || result >= 0) {
      if (entry.listed) this.#forget(entry, 'corrupt'); // a short read: the file was cut
      return 'corrupt';
    }
    this.#fail(new KvError('IO', `${entry.segment.path}: a read failed (errno ${-result})`));
    return 'failed';
  }

  #forget(entry: DiskEntry, reason: 'corrupt' | 'evicted' | 'asked'): void {
    this.#index.remove(entry);
    if (reason === 'corrupt') this.#counts.corrupt++;
    if (reason === 'evicted') this.#counts.evictions++;
  }

  #erase(entry: DiskEntry): void {
    const { segment, hash, pages } = entry;
    const header = encodeHeader({
      namespace: erasedNamespace,
      hash,
      parent: null,
      tokenCount: 0,
      payloadBytes: pages * pageBytes - headerBytes,
      sequence: segment.generation,
      payloadChecksum: 0n,
    });
    this.#pool.erase(entry, header);
  }

  async #evict(segment: Segment): Promise<void> {
    await reinsertHot(segment, {
      slots: this.#options.slots,
      io: this.#io,
      appender: this.#appender,
      onRead: (entry, result) => this.#readEnded(entry, result),
    });
    for (const entry of segment.entries) {
      if (!entry.listed) continue;
      this.#forget(entry, 'evicted');
      this.#options.onEvict?.(entry.namespace, entry.hash);
    }
  }

  async #recover(limitBytes: number): Promise<void> {
    const { dir, log, onStep } = this.#options;
    let found = recoverSegments(dir, log);
    let bytes = found.reduce((sum, segment) => sum + segment.bytes, 0);
    // The budget has shrunk: the oldest segments go.
    for (const segment of [...found]) {
      if (bytes <= limitBytes) break;
      await rm(join(dir, segmentName(segment.id)));
      bytes -= segment.bytes;
      found = found.slice(1);
    }
    for (const segment of found) this.#adopt(segment);
    const last = found.at(-1);
    const open =
      last === undefined || last.sealed || last.generation === 0 ? undefined : this.#pool.segments.get(last.id)!;
    if (open !== undefined) open.state = 'open';
    await this.#pool.ensureUsable();
    this.#appender = new Appender({
      pool: this.#pool,
      index: this.#index,
      io: this.#io,
      maxPendingBytes: this.#options.maxPendingBytes ?? defaultMaxPendingBytes,
      open,
      onFailure: (error) => this.#fail(error),
      step: (step) => onStep?.(step),
    });
    this.#pool.prepareAhead(false);
    const { backend, reason } = this.#io.backend;
    log.info(
      { dir, segments: found.length, blocks: this.#index.count, bytes, backend, reason },
      'the disk tier is open',
    );
  }

  #adopt(found: RecoveredSegment): void {
    const segment = this.#pool.adopt(found);
    for (const { namespace: digest, hash, page, pages, lastUse } of found.blocks) {
      const namespace = namespaceFromDigest(digest);
      segment.recovered(namespace.key, (page + pages) * pageBytes);
      this.#index.add(namespace, hash, segment, page, pages, lastUse);
    }
  }

  async #checkpoint(): Promise<void> {
    const segments = [...this.#pool.segments.values()].filter(({ state }) => state !== 'free');
    if (imageBytes(segments.length, 1, this.#index.count) > this.#metadataBytes / 2) return;
    const image = imageOf(segments, ({ id, generation, state, tail }) => ({
      id,
      generation,
      sealed: state === 'sealed',
      tail,
    }));
    const bytes = encodeImage('checkpoint', image);
    if (bytes.length > this.#metadataBytes / 2) return; // the segments' own indexes will do
    const path = join(this.#options.dir, checkpointName);
    await writeFile(path + unfinishedSuffix, bytes, { mode: 0o600 });
    this.#options.onStep?.('disk.close.checkpoint');
    await rename(path + unfinishedSuffix, path);
  }
}

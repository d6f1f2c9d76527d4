/**
 * The disk tier: logs of objects in preallocated segment files, on one or several devices, written and read by the native
 * engine with O_DIRECT.
 *
 *     write ──stripes──▶ device: Appender ──▶ open segment ──▶ sealed ──evict──▶ recycled under a new generation
 *     read  ──DiskIndex──▶ device: segment, page ──▶ verified in native code ──▶ arena slot
 *
 * Invariants (law 1, 3): what is delivered was verified against namespace, hash, length and both checksums; the bytes of all
 * files together never exceed `capacityBytes`; a device that the world broke takes only what it holds out of the tier, says so
 * once, and comes back by itself. Idea: log-structured region caches (CacheLib's BlockCache, TAO's SSD tier).
 */

import { native } from '@kvtier/data-plane';
import { invariant, KvError } from '@kvtier/errors';
import { expiresOffset, type HashKey, type Namespace } from '@kvtier/identity';
import { settled } from '../kit/settled.ts';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  SlotSizes,
  Tier,
  TierChange,
  TierStats,
  WriteStatus,
} from '../kit/tier.ts';
import { DiskDevice } from './device.ts';
import { DiskIndex } from './disk-index.ts';
import { badMessage, foreignObject, identitiesOf, type ObjectRow, timedOut } from './disk-io.ts';
import { type EntryNumber, noEntry } from './entry-table.ts';
import { FolderMounts } from './folder-mounts.ts';
import { pageBytes } from './format.ts';
import { type DiskTierOptions, placesOf } from './options.ts';
import type { Segment } from './segment.ts';
import { Stripes } from './stripes.ts';

/** So many blocks of a read go to the devices at once: they work on these while the next ones are prepared. */
const readPartBlocks = 128;
const eio = 5;

export class DiskTier implements Tier {
  readonly name = 'disk';
  readonly supports = { persistent: true, shared: false, writable: true, evicts: true };
  readonly #options: DiskTierOptions;
  /** By number, from before they list anything. */
  readonly #made: DiskDevice[] = [];
  readonly #index = new DiskIndex((segment, page, pages) => this.#made[segment.device]!.erase(segment, page, pages));
  #devices: readonly DiskDevice[] = [];
  #stripes = new Stripes([]);
  /** Writes in flight by namespace and hash, with who else waits for them: one block is not written twice. */
  readonly #writing = new Map<string, ((stored: boolean) => void)[]>();
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };
  #outages = 0;
  #foreignBlocks = 0;
  /** Sizes that no device can hold were told of. */
  #toldTooLarge = false;
  #closed = false;

  /** Lock the folders, recover what they hold. KvError CONFIG, LOCKED or IO when one of them cannot be used. */
  static async open(options: DiskTierOptions): Promise<DiskTier> {
    const places = placesOf(options);
    const dirs = places.map(({ dir }) => dir);
    const mounts = await FolderMounts.read(options.mountsFile, dirs);
    const tier = new DiskTier(options);
    const owner = {
      index: tier.#index,
      mounts,
      onMade: (device: DiskDevice) => {
        tier.#made[device.number] = device;
      },
      onRead: (device: DiskDevice, entry: EntryNumber, result: number) => tier.#readEnded(device, entry, result),
      onEvicted: (entry: EntryNumber) => tier.#evicted(entry),
      onOut: (device: DiskDevice, reason: string) => tier.#deviceOut(device, reason),
      onBack: (device: DiskDevice) => {
        tier.#stripes.back(device);
        options.onBackInService?.(device.dir);
      },
    };
    const opening = places.map((place, number) => DiskDevice.open(number, place, options, owner));
    const results = await Promise.allSettled(opening);
    tier.#devices = results.flatMap((result) => (result.status === 'fulfilled' ? [result.value] : []));
    tier.#stripes = new Stripes(tier.#devices);
    const failure = results.find((result) => result.status === 'rejected');
    if (failure === undefined) return tier;
    await tier.close();
    throw failure.reason;
  }

  private constructor(options: DiskTierOptions) {
    this.#options = options;
  }

  /** Which I/O backend serves the tier, and why not io_uring ("" if it does). */
  get ioBackend(): { backend: 'io_uring' | 'threads'; reason: string } {
    return this.#devices[0]!.io.backend;
  }

  /** For tests that make a device fail. */
  get devices(): readonly DiskDevice[] {
    return this.#devices;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    // What followers were told, also while a device that comes back is still being listed.
    const held = this.#closed ? 0 : this.#index.prefix(namespace, hashes);
    this.#counts.hits += held;
    if (held < hashes.length) this.#counts.misses++;
    return held;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    const segments = new Set<Segment>();
    for (let at = hashes.length - 1; at >= 0; at--) {
      const entry = this.#index.get(namespace, hashes[at]!);
      if (entry === noEntry) continue;
      this.#index.touch(entry);
      segments.add(this.#index.segmentOf(entry));
    }
    for (const segment of segments) this.#devices[segment.device]!.touch(segment);
  }

  write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const names = blocks.map(({ hash }) => hash);
    const slots = Float64Array.from(blocks, ({ slot }) => slot);
    const sizes = native.arenaObjects(this.#options.arena, slots, identitiesOf(namespace, names));
    return new Promise((resolve) => {
      const statuses: WriteStatus[] = [];
      const stripes = this.#stripes.batch();
      let open = blocks.length;
      const end = (index: number, status: WriteStatus): void => {
        if (status === 'refused') this.#counts.refused++;
        statuses[index] = status;
        if (--open === 0) resolve(statuses);
      };
      for (const [index, { hash, slot }] of blocks.entries()) {
        const bytes = sizes[index]!;
        const key = namespace.key + hash;
        const others = this.#writing.get(key);
        if (!this.#inService || bytes === 0) end(index, 'refused');
        else if (this.#isReadable(this.#index.get(namespace, hash))) {
          this.touch(namespace, [hash]);
          end(index, 'held');
        } else if (others !== undefined) others.push((stored) => end(index, stored ? 'held' : 'refused'));
        else {
          const jobs = stripes.jobsFor(bytes);
          if (jobs === undefined) {
            this.#tellIfTooLarge(bytes);
            end(index, 'refused');
            continue;
          }
          const waiters: ((stored: boolean) => void)[] = [];
          this.#writing.set(key, waiters);
          const onDone = (stored: boolean): void => {
            this.#writing.delete(key);
            end(index, stored ? 'stored' : 'refused');
            for (const tell of waiters) tell(stored);
          };
          // Out of the header that was found sound above.
          const expiresS = native.arenaRead(this.#options.arena, slot + expiresOffset, 4).readUInt32LE(0);
          jobs.push({ namespace, hash, slot, bytes, lastUse: undefined, expiresS, onDone });
        }
      }
      stripes.submit();
      if (blocks.length === 0) resolve(statuses);
    });
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes: SlotSizes = 'known',
  ): Promise<void> {
    const parts: Promise<void>[] = [];
    for (let from = 0; from < blocks.length; from += readPartBlocks) {
      const part = blocks.slice(from, from + readPartBlocks);
      parts.push(this.#readPart(namespace, part, (index, status) => onDone(from + index, status), sizes));
    }
    await settled(parts);
  }

  objectBytes(namespace: Namespace, hash: HashKey): number | undefined {
    const entry = this.#inService ? this.#index.get(namespace, hash) : noEntry;
    return entry === noEntry ? undefined : this.#index.table.pages(entry) * pageBytes;
  }

  /** What was removed does not come back after a restart, but for what was evicted. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    let count = 0;
    for (const hash of hashes) {
      const entry = this.#index.get(namespace, hash);
      if (entry === noEntry) continue;
      count++;
      this.#forget(entry, reason);
      const segment = this.#index.segmentOf(entry);
      const { table } = this.#index;
      // A newer program's stays where it is, for who can read it.
      if (reason === 'evicted' || reason === 'foreign' || this.#closed) continue;
      this.#devices[segment.device]!.erase(segment, table.page(entry), table.pages(entry));
      for (const device of this.#devices) device.eraseCopies(namespace, hash);
    }
    return count;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#index.follow(listener);
  }

  followInPages(listener: (change: TierChange) => void): Following {
    return this.#index.followInPages(listener);
  }

  stats(): TierStats {
    const broken = this.#devices.filter((device) => device.reason !== '');
    return {
      tier: this.name,
      blocks: this.#index.count,
      bytes: this.#devices.reduce((sum, device) => sum + device.bytes, 0),
      capacityBytes: this.#options.capacityBytes,
      ...this.#counts,
      inService: this.#inService,
      outOfServiceReason: this.#inService ? '' : broken.map((device) => device.reason).join('; '),
      detail: {
        devices: this.#devices.length,
        devices_out_of_service: broken.length,
        devices_without_space: this.#devices.filter((device) => device.isFull).length,
        outages: this.#outages,
        foreign_blocks: this.#foreignBlocks,
        index_bytes: this.#index.table.bytes,
      },
    };
  }

  checkIntegrity(): void {
    this.#index.checkIntegrity(this.#devices.flatMap((device) => [...device.segments]));
    for (const device of this.#devices) device.checkIntegrity();
    const { bytes, capacityBytes } = this.stats();
    invariant(bytes <= capacityBytes, 'disk: over its capacity');
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    await Promise.all(this.#devices.map((device) => device.close()));
    this.#closed = true;
  }

  get #inService(): boolean {
    return !this.#closed && this.#devices.some((device) => device.inService);
  }

  /** What its device lost is listed until it has been dropped. */
  #isReadable(entry: EntryNumber): boolean {
    return entry !== noEntry && this.#deviceOf(entry).canRead;
  }

  #deviceOf(entry: EntryNumber): DiskDevice {
    return this.#devices[this.#index.segmentOf(entry).device]!;
  }

  #deviceOut(device: DiskDevice, reason: string): void {
    this.#outages++;
    this.#index.drop(
      device.segments,
      this.#devices.length > 0 && this.#devices.every((each) => !each.inService && !each.isTried),
    );
    this.#options.onOutOfService?.(reason);
  }

  /** All of it is with the devices when the call returns; the promise is for the end of the last row. */
  async #readPart(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes: SlotSizes,
  ): Promise<void> {
    const { table } = this.#index;
    const found: { index: number; slot: number; entry: EntryNumber; segment: Segment; page: number }[] = [];
    for (const [index, { hash, slot }] of blocks.entries()) {
      const entry = this.#closed ? noEntry : this.#index.get(namespace, hash);
      if (entry === noEntry) onDone(index, 'missing');
      else if (!this.#isReadable(entry)) {
        // Its turn to be dropped has come. No failure of the tier: the other devices are to be asked.
        this.#index.remove(entry);
        onDone(index, 'missing');
      } else if (table.pages(entry) * pageBytes > this.#options.slots.slotBytesOf(slot)) {
        // Never into a slot that is too small for it. All blocks of a namespace are of one size: one of two engines computes its namespace
        // wrongly. Here this would count as held, and keep its name from being written, for ever.
        if (sizes === 'known') this.remove(namespace, [hash], 'misfit');
        onDone(index, 'missing');
      } else found.push({ index, slot, entry, segment: this.#index.segmentOf(entry), page: table.page(entry) });
    }
    if (found.length === 0) return;
    // Neighbours in a file travel as one I/O.
    found.sort((a, b) => a.segment.number - b.segment.number || a.page - b.page);
    let defect: unknown;
    await new Promise<void>((resolve) => {
      let open = found.length;
      for (const device of this.#devices) {
        const own = found.filter(({ segment }) => segment.device === device.number);
        if (own.length === 0) continue;
        const names = own.map(({ entry }) => table.hash(entry));
        const rows = own.map(({ index, slot, entry, segment, page }, at): ObjectRow => {
          segment.uses++;
          const place = { file: segment.file, offset: page * pageBytes, bytes: table.pages(entry) * pageBytes, slot };
          let isAlone = own.length === 1;
          const ended = (result: number): void => {
            if (result === -eio && !isAlone && device.canRead) {
              isAlone = true; // one bad page fails all that travels with it: each of them is read again by itself
              device.read([{ ...place, onDone: ended }], identitiesOf(namespace, [names[at]!]));
              return;
            }
            segment.release();
            onDone(index, this.#readEnded(device, entry, result));
            if (--open === 0) resolve();
          };
          return { ...place, onDone: ended };
        });
        try {
          device.read(rows, identitiesOf(namespace, names));
        } catch (error) {
          // None of its rows has begun; those of other devices are on their way.
          defect ??= error;
          for (const { segment } of own) segment.release();
          open -= own.length;
        }
      }
      if (open === 0) resolve();
    });
    if (defect !== undefined) throw defect;
  }

  #readEnded(device: DiskDevice, entry: EntryNumber, result: number): ReadStatus {
    const { table } = this.#index;
    const segment = this.#index.segmentOf(entry);
    if (result === table.pages(entry) * pageBytes) return 'ready';
    if (result === foreignObject) {
      // Not erased: it is what it has to be.
      if (table.isListed(entry)) this.#forget(entry, 'foreign');
      return 'missing';
    }
    if (result === badMessage || result >= 0) {
      if (!table.isListed(entry)) return 'corrupt';
      this.#forget(entry, 'corrupt');
      // Damaged for good: a start must not list it again. A short read says that the file was cut: then there is nothing to erase.
      if (result < 0) device.erase(segment, table.page(entry), table.pages(entry));
      return 'corrupt';
    }
    if (result === -eio) device.markBad(segment, table.page(entry));
    const what = result === timedOut ? 'the device did not answer in time' : `errno ${-result}`;
    device.fail(new KvError('IO', `${segment.path}: a read failed (${what})`));
    return 'failed';
  }

  #forget(entry: EntryNumber, reason: RemoveReason): void {
    this.#index.remove(entry);
    if (reason === 'corrupt') this.#counts.corrupt++;
    if (reason === 'foreign') this.#foreignBlocks++;
    if (reason === 'evicted') this.#counts.evictions++;
  }

  #evicted(entry: EntryNumber): void {
    const namespace = this.#index.namespaceOf(entry);
    this.#forget(entry, 'evicted');
    this.#options.onEvict?.(namespace, this.#index.table.hash(entry));
  }

  #tellIfTooLarge(bytes: number): void {
    if (this.#toldTooLarge || this.#devices.some((device) => device.accepts(bytes))) return;
    if (!this.#inService) return;
    this.#toldTooLarge = true;
    const { capacityBytes } = this.#options;
    const message = 'a block is too large for the disk tier: no two segments that hold it fit; raise its bytes';
    this.#options.log.warn({ blockBytes: bytes, capacityBytes }, message);
  }
}

/**
 * Follows the bucket: lists the packs, reads the tables of those that are new, drops those that are gone or expired.
 *
 * Every slot number below `packCount` is in one of these states: free (nothing there, as far as we know), a pack of the index, or
 * 'taken': being written or deleted by this node, foreign, or lost to somebody whose pack we have not read yet. Only a listing
 * makes a taken slot free again, unless its owner here does.
 *
 * Invariant: an object that does not begin with a pack's magic is never deleted, never read as a block, and its slot never used.
 */
import { Buffer } from 'node:buffer';
import { KvError } from '@kvtier/errors';
import type { DiskLog } from '../disk/options.ts';
import type { ListedObject } from './answers.ts';
import type { S3Plan } from './options.ts';
import { decodePackTable, type PackTable, packHeaderBytes, packTableBytesOf } from './pack-format.ts';
import type { PackIndex } from './pack-index.ts';
import type { S3Link } from './s3-link.ts';

export const packsBelow = 'v1/packs/';
export const packKey = (slot: number): string => packsBelow + String(slot).padStart(8, '0');
/** Read at first; holds the whole table of most packs. */
const firstReadBytes = 16 << 10;
const tablesAtOnce = 8;

export interface DiscoveryOptions {
  readonly plan: S3Plan;
  readonly link: S3Link;
  readonly index: PackIndex;
  readonly log: DiskLog;
  readonly nowMs: () => number;
  readonly onEvicted: (blockCount: number) => void;
}

export class Discovery {
  readonly #options: DiscoveryOptions;
  /** Slots that nothing is in, as far as this node knows. */
  readonly free: Set<number>;
  /** This node writes or deletes there now. */
  readonly busy = new Set<number>();
  /** Not ours, or damaged and refused deletion: by slot, the ETag, so that each is looked at once. */
  readonly #foreign = new Map<number, string>();
  #otherForeign = 0;
  #pages = 0;

  constructor(options: DiscoveryOptions) {
    this.#options = options;
    this.free = new Set(Array.from({ length: options.plan.packCount }, (_, slot) => slot));
  }

  get foreignCount(): number {
    return this.#foreign.size + this.#otherForeign;
  }

  /** A listing costs a request for every thousand packs: large buckets are listed less often. */
  get listingPages(): number {
    return this.#pages;
  }

  /** One pass. KvError when the bucket cannot be listed or a table not be read. */
  async refresh(deadlineMs: number): Promise<void> {
    const { plan, link, index, log, nowMs } = this.#options;
    const busyBefore = new Set(this.busy);
    const packsBefore = new Map(index.packs);
    const listed = await link.list(packsBelow, deadlineMs);
    this.#pages = Math.ceil(listed.length / 1000);
    const bySlot = new Map<number, ListedObject>();
    this.#otherForeign = 0;
    for (const object of listed) {
      const slot = slotOf(object.key);
      if (slot === undefined) this.#otherForeign++;
      else bySlot.set(slot, object);
    }
    // What this node began or ended meanwhile is newer than the listing.
    const isOlder = (slot: number): boolean =>
      busyBefore.has(slot) || this.busy.has(slot) || packsBefore.get(slot) !== index.packs.get(slot);
    for (const pack of [...index.packs.values()]) {
      const object = bySlot.get(pack.slot);
      if (!isOlder(pack.slot) && object?.etag !== pack.etag) index.drop(pack);
    }
    for (const slot of this.#foreign.keys()) {
      if (bySlot.get(slot)?.etag !== this.#foreign.get(slot)) this.#foreign.delete(slot);
    }
    for (let slot = 0; slot < plan.packCount; slot++) {
      if (isOlder(slot)) continue;
      if (bySlot.has(slot)) this.free.delete(slot);
      else this.free.add(slot);
    }
    const expiredMs = nowMs() + link.clockOffsetMs - plan.ttlMs;
    const unknown: [number, ListedObject][] = [];
    for (const [slot, object] of bySlot) {
      if (isOlder(slot) || this.#foreign.has(slot)) continue;
      const pack = index.packs.get(slot);
      if (pack === undefined) unknown.push([slot, object]);
      else if (object.modifiedMs < expiredMs) {
        this.#options.onEvicted(index.drop(pack));
        await this.#delete(slot, deadlineMs);
      }
    }
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next < unknown.length) {
        const [slot, object] = unknown[next++]!;
        await this.#meet(slot, object, expiredMs, deadlineMs);
      }
    };
    await Promise.all(Array.from({ length: Math.min(tablesAtOnce, unknown.length) }, worker));
    if (this.foreignCount > 0)
      log.info({ foreign: this.foreignCount }, 's3: objects under our prefix that are not ours are left alone');
  }

  /** The table of the pack in a slot; undefined: it is gone, or replaced by another. */
  async readTable(
    slot: number,
    object: Pick<ListedObject, 'etag' | 'bytes'>,
    deadlineMs: number,
  ): Promise<PackTable | 'foreign' | 'damaged' | undefined> {
    const { link } = this.#options;
    if (object.bytes < packHeaderBytes) return 'foreign';
    const start = Buffer.alloc(Math.min(firstReadBytes, object.bytes));
    if (!(await link.get(packKey(slot), object.etag, 0, [start], deadlineMs))) return undefined;
    const tableBytes = packTableBytesOf(start);
    if (typeof tableBytes === 'string') return tableBytes;
    if (tableBytes > object.bytes) return 'damaged';
    if (tableBytes <= start.length) return decodePackTable(start.subarray(0, tableBytes), object.bytes);
    const rest = Buffer.alloc(tableBytes - start.length);
    if (!(await link.get(packKey(slot), object.etag, start.length, [rest], deadlineMs))) return undefined;
    return decodePackTable(Buffer.concat([start, rest]), object.bytes);
  }

  /** An object in a slot that this node knows nothing of. */
  async #meet(slot: number, object: ListedObject, expiredMs: number, deadlineMs: number): Promise<void> {
    const { plan, index, log, nowMs, link } = this.#options;
    const table = await this.readTable(slot, object, deadlineMs);
    if (table === undefined || this.busy.has(slot) || index.packs.has(slot)) return;
    if (table === 'foreign') {
      this.#foreign.set(slot, object.etag);
      return;
    }
    const isBeyond = slot >= plan.packCount || object.bytes > plan.packBytes; // of a larger budget, before
    if (table === 'damaged' || isBeyond || object.modifiedMs < expiredMs) {
      if (table === 'damaged') log.warn({ key: packKey(slot) }, 's3: a pack whose table is damaged is removed');
      await this.#delete(slot, deadlineMs);
      return;
    }
    const lastUseMs = Math.min(object.modifiedMs - link.clockOffsetMs, nowMs());
    index.add(
      { slot, etag: object.etag, bytes: object.bytes, modifiedMs: object.modifiedMs, lastUseMs },
      table.records,
    );
  }

  /**
   * Delete what is in a slot. Races are harmless: another node may have deleted it before us and put a new pack there, which
   * then goes instead. Its blocks become misses; no key ever holds two objects, so the budget holds either way.
   */
  async #delete(slot: number, deadlineMs: number): Promise<void> {
    this.busy.add(slot);
    try {
      await this.#options.link.delete(packKey(slot), deadlineMs);
      if (slot < this.#options.plan.packCount) this.free.add(slot);
    } catch (error) {
      this.#options.log.warn({ reason: KvError.from(error).message }, 's3: a pack could not be deleted');
    } finally {
      this.busy.delete(slot);
    }
  }
}

/** undefined: not a name that this program gives. */
function slotOf(key: string): number | undefined {
  const name = key.slice(packsBelow.length);
  return /^\d{8}$/.test(name) ? Number(name) : undefined;
}

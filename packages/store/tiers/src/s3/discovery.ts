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
import { type Log, SliceTimer } from '@kvtier/runtime';
import type { ListedObject } from './answers.ts';
import type { S3Plan } from './options.ts';
import { decodePackTable, type PackTable, packHeaderBytes, packTableBytesOf } from './pack-format.ts';
import type { Pack, PackIndex } from './pack-index.ts';
import type { S3Api } from './s3-api.ts';
import { SlotSet } from './slot-set.ts';

export const packsBelow = 'v1/packs/';
export const packKey = (slot: number): string => packsBelow + String(slot).padStart(8, '0');
/** Read at first; holds the whole table of most packs. */
const firstReadBytes = 16 << 10;
/** Tables read, and packs deleted, at one time. */
const requestsAtOnce = 8;

export interface DiscoveryOptions {
  readonly plan: S3Plan;
  readonly api: S3Api;
  readonly index: PackIndex;
  readonly log: Log;
  readonly onEvicted: (blockCount: number) => void;
}

/** An object in a slot, and what time the server had when it said so. */
interface Found {
  readonly slot: number;
  readonly object: ListedObject;
  readonly serverMs: number | undefined;
}

export class Discovery {
  readonly #options: DiscoveryOptions;
  /** Slots that nothing is in, as far as this node knows. */
  readonly free: SlotSet;
  /** This node writes or deletes there now. */
  readonly busy = new Set<number>();
  /** Not ours, or damaged and refused deletion: by slot, the ETag, so that each is looked at once. */
  readonly #foreign = new Map<number, string>();
  #otherForeign = 0;
  #pages = 0;

  constructor(options: DiscoveryOptions) {
    this.#options = options;
    this.free = new SlotSet(options.plan.packCount, true);
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
    const { index, log, onEvicted } = this.#options;
    const changes = index.watch();
    try {
      const { unknown, expired } = await this.#compare(changes.slots, deadlineMs);
      await this.#each(expired, async ({ slot, object }) => {
        const pack = index.packs.get(slot);
        if (this.busy.has(slot) || pack?.etag !== object.etag) return;
        onEvicted(index.drop(pack));
        await this.#delete(slot, deadlineMs);
      });
      await this.#each(unknown, (found) => this.#meet(found, deadlineMs));
    } finally {
      changes.end();
    }
    if (this.foreignCount > 0)
      log.info({ foreign: this.foreignCount }, 's3: objects under our prefix that are not ours are left alone');
  }

  /** Lists, and follows: a page at a time, then the rest in slices. `changed`: packs that this node brought or took meanwhile. */
  async #compare(changed: Set<number>, deadlineMs: number): Promise<{ unknown: Found[]; expired: Found[] }> {
    const { plan, api, index } = this.#options;
    const busyBefore = new Set(this.busy);
    // What this node began or ended meanwhile is newer than the listing.
    const isOlder = (slot: number): boolean => busyBefore.has(slot) || this.busy.has(slot) || changed.has(slot);
    const listed = new SlotSet(plan.packCount);
    const drop = (pack: Pack): void => {
      index.drop(pack);
      changed.delete(pack.slot); // by the listing's own word
    };
    const unknown: Found[] = [];
    const expired: Found[] = [];
    let pages = 0;
    let foreign = 0;
    for await (const { objects, serverMs } of api.pages(packsBelow, deadlineMs)) {
      pages++;
      for (const object of objects) {
        const slot = slotOf(object.key);
        if (slot === undefined) {
          foreign++;
          continue;
        }
        listed.add(slot);
        if (this.#foreign.get(slot) !== object.etag) this.#foreign.delete(slot);
        if (isOlder(slot) || this.#foreign.has(slot)) continue;
        const found = { slot, object, serverMs };
        const pack = index.packs.get(slot);
        if (pack?.etag === object.etag) {
          if (this.#isExpired(found)) expired.push(found);
          continue;
        }
        if (pack !== undefined) drop(pack);
        unknown.push(found);
      }
    }
    this.#pages = pages;
    this.#otherForeign = foreign;
    const timer = new SliceTimer();
    for (const pack of index.packs.values()) {
      if (!listed.has(pack.slot) && !isOlder(pack.slot)) drop(pack);
      if (timer.due) await timer.next();
    }
    for (const slot of this.#foreign.keys()) if (!listed.has(slot)) this.#foreign.delete(slot);
    for (const slot of listed.alike(this.free)) {
      if (isOlder(slot)) continue;
      if (listed.has(slot)) this.free.delete(slot);
      else this.free.add(slot);
    }
    return { unknown, expired };
  }

  /** By the clock of the server that listed it, whatever ours says; one that does not tell the time lets nothing expire. */
  #isExpired({ object, serverMs }: Found): boolean {
    return serverMs !== undefined && object.modifiedMs < serverMs - this.#options.plan.ttlMs;
  }

  async #each(all: readonly Found[], act: (found: Found) => Promise<void>): Promise<void> {
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next < all.length) await act(all[next++]!);
    };
    await Promise.all(Array.from({ length: Math.min(requestsAtOnce, all.length) }, worker));
  }

  /** The table of the pack in a slot; undefined: it is gone, or replaced by another. */
  async readTable(
    slot: number,
    object: Pick<ListedObject, 'etag' | 'bytes'>,
    deadlineMs: number,
  ): Promise<PackTable | 'foreign' | 'damaged' | undefined> {
    const { api } = this.#options;
    if (object.bytes < packHeaderBytes) return 'foreign';
    const start = Buffer.alloc(Math.min(firstReadBytes, object.bytes));
    if (!(await api.get(packKey(slot), object.etag, 0, [start], deadlineMs))) return undefined;
    const tableBytes = packTableBytesOf(start);
    if (typeof tableBytes === 'string') return tableBytes;
    if (tableBytes > object.bytes) return 'damaged';
    if (tableBytes <= start.length) return decodePackTable(start.subarray(0, tableBytes), object.bytes);
    const rest = Buffer.alloc(tableBytes - start.length);
    if (!(await api.get(packKey(slot), object.etag, start.length, [rest], deadlineMs))) return undefined;
    return decodePackTable(Buffer.concat([start, rest]), object.bytes);
  }

  /** An object in a slot that this node knows nothing of. */
  async #meet(found: Found, deadlineMs: number): Promise<void> {
    const { slot, object, serverMs } = found;
    const { plan, index, log } = this.#options;
    const table = await this.readTable(slot, object, deadlineMs);
    if (table === undefined || this.busy.has(slot) || index.packs.has(slot)) return;
    if (table === 'foreign') {
      this.#foreign.set(slot, object.etag);
      return;
    }
    const isBeyond = slot >= plan.packCount || object.bytes > plan.packBytes; // of a larger budget, before
    if (table === 'damaged' || isBeyond || this.#isExpired(found)) {
      if (table === 'damaged') log.warn({ key: packKey(slot) }, 's3: a pack whose table is damaged is removed');
      await this.#delete(slot, deadlineMs);
      return;
    }
    const ageMs = Math.max(0, (serverMs ?? object.modifiedMs) - object.modifiedMs);
    const lastUseMs = performance.now() - ageMs;
    index.add({ slot, etag: object.etag, bytes: object.bytes, lastUseMs }, table.records);
  }

  /**
   * Delete what is in a slot. Races are harmless: another node may have deleted it before us and put a new pack there, which
   * then goes instead. Its blocks become misses; no key ever holds two objects, so the budget holds either way.
   */
  async #delete(slot: number, deadlineMs: number): Promise<void> {
    this.busy.add(slot);
    try {
      await this.#options.api.delete(packKey(slot), deadlineMs);
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

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
import { settled } from '../kit/settled.ts';
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
/** So many tables in a row that are not answered for: it is the server, and no pack's own fault. */
const silencesMax = 2 * requestsAtOnce;
/** Slots that are compared without a look at the time, which would take longer than they do. */
const slotsAtOnce = 4096;
/**
 * A pack that could not be read, or deleted, is left alone for so many passes; for one at first, and twice as many each time, where
 * time may mend it.
 */
const passesLeftAlone = 10;

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
  /** Slots that nothing is in, as far as this node knows: none before the first listing. */
  readonly free: SlotSet;
  /** This node writes or deletes there now. */
  readonly busy = new Set<number>();
  /** Not ours: by slot, the ETag, so that each is looked at once. */
  readonly #foreign = new Map<number, string>();
  #otherForeign = 0;
  /**
   * Packs that could not be read, or deleted: by slot, the ETag, for how many passes they are left alone, and the pass that looks
   * again.
   */
  readonly #unreadable = new Map<
    number,
    { readonly etag: string; readonly passes: number; readonly nextPass: number }
  >();
  /** Of packs that are left alone since a pass last told of them: by its line, how many, and why the last one is. */
  readonly #untold = new Map<string, { readonly packs: number; readonly reason: string }>();
  #pages = 0;
  #passes = 0;
  #silences = 0;
  #isCut = false;

  constructor(options: DiscoveryOptions) {
    this.#options = options;
    this.free = new SlotSet(options.plan.packCount);
  }

  get foreignCount(): number {
    return this.#foreign.size + this.#otherForeign;
  }

  get unreadableCount(): number {
    return this.#unreadable.size;
  }

  /** A listing costs a request for every thousand packs: large buckets are listed less often. */
  get listingPages(): number {
    return this.#pages;
  }

  /**
   * One pass; `onListed`: the bucket is listed, and its new packs are read from now on. However many these are, each request has its
   * own limit. KvError when the bucket cannot be listed.
   */
  async refresh(onListed: () => void = () => {}): Promise<void> {
    const { index, log, onEvicted } = this.#options;
    this.#passes++;
    this.#silences = 0;
    const { unknown, expired } = await this.#compare();
    this.#isCut = false; // what was asked before says nothing of a bucket that could be listed just now
    onListed();
    await this.#each(expired, async ({ slot, object }) => {
      const pack = index.packs.get(slot);
      if (this.busy.has(slot) || pack?.etag !== object.etag) return;
      onEvicted(index.drop(pack));
      await this.#delete(slot, object.etag);
    });
    await this.#each(this.#newFirst(unknown), (found) => this.#meet(found));
    for (const [line, fields] of this.#untold) log.warn(fields, line);
    this.#untold.clear();
    if (this.foreignCount > 0)
      log.info({ foreign: this.foreignCount }, 's3: objects under our prefix that are not ours are left alone');
  }

  /** The server is gone: the pass that is under way reads nothing new, so that the next listing need not wait for it. */
  cutShort(): void {
    this.#isCut = true;
  }

  async #compare(): Promise<{ unknown: Found[]; expired: Found[] }> {
    const changes = this.#options.index.watch();
    try {
      return await this.#follow(changes.slots);
    } finally {
      changes.end();
    }
  }

  /** Lists, and follows, in slices. `changed`: packs that this node brought or took meanwhile. */
  async #follow(changed: Set<number>): Promise<{ unknown: Found[]; expired: Found[] }> {
    const { plan, api, index } = this.#options;
    const busyBefore = new Set(this.busy);
    // What this node began or ended meanwhile is newer than the listing.
    const isOlder = (slot: number): boolean => busyBefore.has(slot) || this.busy.has(slot) || changed.has(slot);
    const listed = new SlotSet(plan.packCount);
    const beyond = new Set<number>(); // of a larger budget, before
    const drop = (pack: Pack): void => {
      index.drop(pack);
      changed.delete(pack.slot); // by the listing's own word
    };
    const unknown: Found[] = [];
    const expired: Found[] = [];
    let pages = 0;
    let foreign = 0;
    const timer = new SliceTimer();
    for await (const { objects, serverMs } of api.pages(packsBelow, () => this.#deadlineMs())) {
      pages++;
      for (const object of objects) {
        if (timer.due) await timer.next(); // packs that go have blocks, of each of which others are told
        const slot = slotOf(object.key);
        if (slot === undefined) {
          foreign++;
          continue;
        }
        if (slot < plan.packCount) listed.add(slot);
        else beyond.add(slot);
        if (this.#foreign.get(slot) !== object.etag) this.#foreign.delete(slot);
        const unreadable = this.#unreadable.get(slot);
        if (unreadable !== undefined && unreadable.etag !== object.etag) this.#unreadable.delete(slot);
        else if (unreadable !== undefined && unreadable.nextPass > this.#passes) continue;
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
    for (const pack of index.packs.values()) {
      if (!listed.has(pack.slot) && !isOlder(pack.slot)) drop(pack);
      if (timer.due) await timer.next();
    }
    for (const slots of [this.#foreign, this.#unreadable])
      for (const slot of slots.keys()) if (!listed.has(slot) && !beyond.has(slot)) slots.delete(slot);
    let compared = 0;
    for (const slot of listed.alike(this.free)) {
      if (++compared % slotsAtOnce === 0 && timer.due) await timer.next();
      if (isOlder(slot)) continue;
      if (listed.has(slot)) this.free.delete(slot);
      else this.free.add(slot);
    }
    return { unknown, expired };
  }

  /** Packs that were not answered for before wait for those that nobody has asked for, or these would never have their turn. */
  #newFirst(unknown: readonly Found[]): Found[] {
    const isNew = ({ slot }: Found): boolean => !this.#unreadable.has(slot);
    const dueOf = ({ slot }: Found): number => this.#unreadable.get(slot)!.nextPass;
    const others = unknown.filter((found) => !isNew(found)).sort((a, b) => dueOf(a) - dueOf(b));
    return [...unknown.filter(isNew), ...others];
  }

  /** By the clock of the server that listed it, whatever ours says; one that does not tell the time lets nothing expire. */
  #isExpired({ object, serverMs }: Found): boolean {
    return serverMs !== undefined && object.modifiedMs < serverMs - this.#options.plan.ttlMs;
  }

  /** Ends early when the server is gone: the rest is for a later pass. */
  async #each(all: readonly Found[], act: (found: Found) => Promise<void>): Promise<void> {
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next < all.length && !this.#isOver && this.#silences < silencesMax) await act(all[next++]!);
    };
    await settled(Array.from({ length: Math.min(requestsAtOnce, all.length) }, worker));
  }

  /** No pass goes on. (While the server is asked whether it is back, nothing is suspended.) */
  get #isOver(): boolean {
    return this.#isCut || this.#options.api.suspended !== undefined;
  }

  /** Of one request with its tries. */
  #deadlineMs(): number {
    return performance.now() + this.#options.plan.timeLimitMs;
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
    // A table that fails says nothing of the server: it may be a pack that was put away, and their listing is counted.
    if (!(await api.get(packKey(slot), object.etag, 0, [start], deadlineMs, false))) return undefined;
    const tableBytes = packTableBytesOf(start);
    if (typeof tableBytes === 'string') return tableBytes;
    if (tableBytes > object.bytes) return 'damaged';
    if (tableBytes <= start.length) return decodePackTable(start.subarray(0, tableBytes), object.bytes);
    const rest = Buffer.alloc(tableBytes - start.length);
    if (!(await api.get(packKey(slot), object.etag, start.length, [rest], deadlineMs, false))) return undefined;
    return decodePackTable(Buffer.concat([start, rest]), object.bytes);
  }

  /** It cannot be read, or deleted: nothing is asked for it before some passes. */
  leaveAlone(slot: number, etag: string, why: KvError): void {
    const before = this.#unreadable.get(slot);
    const again = before?.etag === etag ? 2 * before.passes : 1;
    const passes = why.retry ? Math.min(again, passesLeftAlone) : passesLeftAlone;
    this.#unreadable.set(slot, { etag, passes, nextPass: this.#passes + passes });
  }

  /** A pack that is to go cannot: without this each pass would ask for it again. */
  notDeleted(slot: number, etag: string, why: KvError): void {
    if (this.#isOver) return; // the server is gone, and nothing is known of this pack
    this.leaveAlone(slot, etag, why);
    this.#tellLater('s3: packs that cannot be deleted are left alone for a while', why);
  }

  #tellLater(line: string, { message: reason }: KvError): void {
    const packs = (this.#untold.get(line)?.packs ?? 0) + 1;
    this.#untold.set(line, { packs, reason });
  }

  /** An object in a slot that this node knows nothing of. */
  async #meet(found: Found): Promise<void> {
    const { slot, object, serverMs } = found;
    const { plan, index, log } = this.#options;
    let table: PackTable | 'foreign' | 'damaged' | undefined;
    try {
      table = await this.readTable(slot, object, this.#deadlineMs());
    } catch (error) {
      if (!(error instanceof KvError)) throw error;
      if (this.#isOver) return; // the server is gone, and nothing is known of this pack
      this.#silences = error.retry ? this.#silences + 1 : 0;
      this.leaveAlone(slot, object.etag, error);
      this.#tellLater('s3: packs that cannot be read are left alone for a while', error);
      return;
    }
    this.#silences = 0;
    const isOther = this.busy.has(slot) || index.packs.has(slot);
    if (table === undefined || table === 'foreign' || isOther) {
      this.#unreadable.delete(slot);
      if (table === 'foreign' && !isOther) this.#foreign.set(slot, object.etag);
      return;
    }
    const isBeyond = slot >= plan.packCount || object.bytes > plan.packBytes; // of a larger budget, before
    if (table === 'damaged' || isBeyond || this.#isExpired(found)) {
      const isGone = await this.#delete(slot, object.etag);
      if (isGone && table === 'damaged')
        log.warn({ key: packKey(slot) }, 's3: a pack with a damaged table was removed');
      return;
    }
    this.#unreadable.delete(slot);
    const ageMs = Math.max(0, (serverMs ?? object.modifiedMs) - object.modifiedMs);
    const lastUseMs = performance.now() - ageMs;
    index.add({ slot, etag: object.etag, bytes: object.bytes, lastUseMs }, table.records);
  }

  /**
   * Delete what is in a slot. Races are harmless: another node may have deleted it before us and put a new pack there, which
   * then goes instead. Its blocks become misses; no key ever holds two objects, so the budget holds either way. false: it is
   * left alone for a while.
   */
  async #delete(slot: number, etag: string): Promise<boolean> {
    this.busy.add(slot);
    try {
      await this.#options.api.delete(packKey(slot), this.#deadlineMs());
      this.#unreadable.delete(slot);
      if (slot < this.#options.plan.packCount) this.free.add(slot);
      return true;
    } catch (error) {
      this.notDeleted(slot, etag, KvError.from(error));
      return false;
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

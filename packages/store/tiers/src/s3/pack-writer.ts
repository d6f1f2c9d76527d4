/**
 * Gathers blocks into packs and stores each pack in a slot that it claims by name.
 *
 *     append ──▶ open pack ──full, or flushMs after its first block──▶ claim a slot ──▶ PUT If-None-Match: * ──▶ stored
 *                                                        │ none free: PUT If-Match, in the place   │ 412: somebody else's
 *                                                        │   of the coldest pack                   │
 *                                                        └────────────◀──── another slot ◀─────────┘
 *
 * Why the budget holds with no coordinator (law 3): there are `packCount` names, an object under one of them has at most
 * `packBytes`, and the server keeps at most one object under a name. Whoever writes, dies or repeats a request, the bucket
 * never holds more than packCount × packBytes; the conditions only keep nodes from throwing each other's packs away.
 */
import { randomBytes } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import { type Discovery, packKey } from './discovery.ts';
import { maxPendingBytes, type S3Plan } from './options.ts';
import { encodePackTable, maxPackRecords, packRecordBytes, packTableBytes } from './pack-format.ts';
import type { Pack, PackIndex } from './pack-index.ts';
import { NotStored, type S3Api } from './s3-api.ts';
import type { WriteRefusals } from './write-refusals.ts';

/** Slots that turn out to be taken before a pack is given up. */
const maxClaims = 8;
/** Packs that are evicted for one new pack: a second, should another node be quicker. */
const maxEvictions = 2;

export interface PackJob {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly slot: number;
  /** Header and payload. */
  readonly bytes: number;
  readonly onDone: (stored: boolean) => void;
}

export interface PackWriterOptions {
  readonly plan: S3Plan;
  readonly api: S3Api;
  readonly index: PackIndex;
  readonly discovery: Discovery;
  readonly memory: ArenaMemory;
  readonly log: Log;
  readonly refusals: WriteRefusals;
  readonly onEvicted: (blockCount: number) => void;
}

/** A slot that no other task of this node writes to until it is no longer busy. */
interface Claim {
  readonly slot: number;
  /** What is there, and goes when the new pack has its place; undefined: nothing. */
  readonly replaced: Pack | undefined;
}

export class PackWriter {
  readonly #options: PackWriterOptions;
  #open: PackJob[] = [];
  #openBytes = 0;
  #flushTimer: NodeJS.Timeout | undefined;
  readonly #queue: { readonly jobs: PackJob[]; readonly deadlineMs: number }[] = [];
  readonly #running = new Set<Promise<void>>();
  pendingBytes = 0;

  constructor(options: PackWriterOptions) {
    this.#options = options;
  }

  hasRoom(bytes: number): boolean {
    return this.pendingBytes + bytes <= maxPendingBytes;
  }

  /** Whether an object of this size fits a pack at all. */
  fits(bytes: number): boolean {
    return packTableBytes(1) + bytes <= this.#options.plan.packBytes;
  }

  append(job: PackJob): void {
    const { packBytes, flushMs } = this.#options.plan;
    const addedBytes = packRecordBytes + job.bytes;
    const isFull = packTableBytes(0) + this.#openBytes + addedBytes > packBytes || this.#open.length === maxPackRecords;
    if (isFull) this.flush();
    this.#open.push(job);
    this.#openBytes += addedBytes;
    this.pendingBytes += job.bytes;
    this.#flushTimer ??= setTimeout(() => this.flush(), flushMs);
  }

  flush(): void {
    clearTimeout(this.#flushTimer);
    this.#flushTimer = undefined;
    if (this.#open.length === 0) return;
    this.#queue.push({ jobs: this.#open, deadlineMs: performance.now() + this.#options.plan.timeLimitMs });
    this.#open = [];
    this.#openBytes = 0;
    this.#start();
  }

  /** What is gathered goes out; resolves when all of it has ended. */
  async idle(): Promise<void> {
    this.flush();
    while (this.#running.size > 0) await Promise.all(this.#running);
  }

  #start(): void {
    const { refusals, log } = this.#options;
    while (this.#running.size < this.#options.plan.maxConnections) {
      const pack = this.#queue.shift();
      if (pack === undefined) return;
      if (!refusals.mayTry) {
        this.#end(pack.jobs, false);
        continue;
      }
      const tried = refusals.began();
      const running = this.#store(pack.jobs, pack.deadlineMs)
        .catch((error: unknown) => {
          // Of many that are refused one line speaks, and of none of the tries.
          if (refusals.reason === '') log.warn({ reason: KvError.from(error).message }, 's3: a pack was not stored');
          return false;
        })
        .then((stored) => {
          tried();
          this.#running.delete(running);
          this.#end(pack.jobs, stored);
          this.#start();
        });
      this.#running.add(running);
    }
  }

  #end(jobs: readonly PackJob[], stored: boolean): void {
    for (const job of jobs) {
      this.pendingBytes -= job.bytes;
      job.onDone(stored);
    }
  }

  /** false: no slot could be had. KvError when the server does not do it. */
  async #store(jobs: readonly PackJob[], deadlineMs: number): Promise<boolean> {
    const { api, memory, index, discovery, refusals } = this.#options;
    await refusals.proven(deadlineMs);
    const id = randomBytes(16).toString('hex');
    const table = encodePackTable(id, jobs);
    const body = [table, ...jobs.map(({ slot, bytes }) => memory.view(slot, bytes))];
    const packBytes = body.reduce((sum, part) => sum + part.length, 0);
    let evictions = 0;
    for (let claims = 0; claims < maxClaims; claims++) {
      if (discovery.free.size === 0 && ++evictions > maxEvictions) return false;
      const claim = await this.#claim(deadlineMs);
      if (claim === undefined) return false;
      const { slot, replaced } = claim;
      try {
        const { outcome, etag, unsure } = await api.put(packKey(slot), body, replaced?.etag ?? null, deadlineMs);
        let stored = { etag, isOurs: outcome === 'stored' };
        if (outcome === 'other' && unsure) stored = await this.#whose(slot, id, packBytes, deadlineMs);
        if (stored.isOurs) {
          this.#evict(replaced);
          const records = this.#recordsOf(jobs, table.length);
          index.add({ slot, etag: stored.etag, bytes: packBytes, lastUseMs: performance.now() }, records, true);
          return true;
        }
        // Somebody has been quicker; the next listing says what is there.
        if (!unsure && this.#isThere(replaced)) index.drop(replaced);
      } catch (error) {
        // Something may be the matter with this pack alone: it is not to be in the way of each write from now on.
        if (this.#isThere(replaced)) index.touch(replaced);
        // As empty as it was, so that the next try need not make room again.
        else if (replaced === undefined && error instanceof NotStored) discovery.free.add(slot);
        throw error;
      } finally {
        discovery.busy.delete(slot);
      }
    }
    return false;
  }

  #isThere(pack: Pack | undefined): pack is Pack {
    return pack !== undefined && this.#options.index.packs.get(pack.slot) === pack;
  }

  /** It went, for another one. A read may have found out before. */
  #evict(pack: Pack | undefined): void {
    const { index, onEvicted } = this.#options;
    if (this.#isThere(pack)) onEvicted(index.drop(pack));
  }

  #recordsOf(jobs: readonly PackJob[], firstOffset: number) {
    let offset = firstOffset;
    return jobs.map(({ namespace, hash, bytes }) => {
      offset += bytes;
      return { namespace, hash, bytes, offset: offset - bytes };
    });
  }

  /** undefined: every slot is in use right now. */
  async #claim(deadlineMs: number): Promise<Claim | undefined> {
    const { api, index, discovery } = this.#options;
    const { free, busy } = discovery;
    if (free.size > 0) {
      // At random, so that two nodes rarely want the same.
      let skip = Math.floor(Math.random() * Math.min(free.size, 64));
      for (const slot of free) {
        if (skip-- > 0) continue;
        free.delete(slot);
        busy.add(slot);
        return { slot, replaced: undefined };
      }
    }
    const coldest = index.coldest((pack) => !busy.has(pack.slot));
    if (coldest === undefined) return undefined;
    const { slot } = coldest;
    busy.add(slot);
    // In one request, where the server can: no moment at which another node could take the place, and nothing goes for a pack that
    // is not stored then.
    if (api.canReplace) return { slot, replaced: coldest };
    try {
      await api.delete(packKey(slot), deadlineMs, true);
      this.#evict(coldest);
      return { slot, replaced: undefined };
    } catch (error) {
      if (this.#isThere(coldest)) index.touch(coldest);
      busy.delete(slot);
      throw error;
    }
  }

  /** After a try without an answer the slot is taken: by our own pack, perhaps. */
  async #whose(
    slot: number,
    id: string,
    bytes: number,
    deadlineMs: number,
  ): Promise<{ etag: string; isOurs: boolean }> {
    const { api, discovery } = this.#options;
    const object = (await api.list(packKey(slot), deadlineMs)).find(({ key }) => key === packKey(slot));
    if (object === undefined || object.bytes !== bytes) return { etag: '', isOurs: false };
    const table = await discovery.readTable(slot, object, deadlineMs);
    return { etag: object.etag, isOurs: typeof table === 'object' && table.id === id };
  }
}

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
import type { PackIndex } from './pack-index.ts';
import type { S3Api } from './s3-api.ts';

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
  readonly onEvicted: (blockCount: number) => void;
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
    while (this.#running.size < this.#options.plan.maxConnections) {
      const pack = this.#queue.shift();
      if (pack === undefined) return;
      const running = this.#store(pack.jobs, pack.deadlineMs)
        .catch((error: unknown) => {
          this.#options.log.warn({ reason: KvError.from(error).message }, 's3: a pack was not stored');
          return false;
        })
        .then((stored) => {
          this.#running.delete(running);
          for (const job of pack.jobs) {
            this.pendingBytes -= job.bytes;
            job.onDone(stored);
          }
          this.#start();
        });
      this.#running.add(running);
    }
  }

  /** false: no slot could be had. KvError when the server does not do it. */
  async #store(jobs: readonly PackJob[], deadlineMs: number): Promise<boolean> {
    const { api, memory, index, discovery } = this.#options;
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
        const { outcome, etag, unsure } = await api.put(packKey(slot), body, replaced, deadlineMs);
        let stored = { etag, isOurs: outcome === 'stored' };
        if (outcome === 'other' && unsure) stored = await this.#whose(slot, id, packBytes, deadlineMs);
        if (!stored.isOurs) continue; // the next listing says what is there
        const records = this.#recordsOf(jobs, table.length);
        index.add({ slot, etag: stored.etag, bytes: packBytes, lastUseMs: performance.now() }, records);
        return true;
      } finally {
        discovery.busy.delete(slot);
      }
    }
    return false;
  }

  #recordsOf(jobs: readonly PackJob[], firstOffset: number) {
    let offset = firstOffset;
    return jobs.map(({ namespace, hash, bytes }) => {
      offset += bytes;
      return { namespace, hash, bytes, offset: offset - bytes };
    });
  }

  /**
   * A slot that no other task of this node writes to until it is no longer busy, and the ETag of what is to be replaced there (null:
   * nothing); undefined: every one is in use right now.
   */
  async #claim(deadlineMs: number): Promise<{ slot: number; replaced: string | null } | undefined> {
    const { api, index, discovery, onEvicted } = this.#options;
    const { free, busy } = discovery;
    if (free.size > 0) {
      // At random, so that two nodes rarely want the same.
      let skip = Math.floor(Math.random() * Math.min(free.size, 64));
      for (const slot of free) {
        if (skip-- > 0) continue;
        free.delete(slot);
        busy.add(slot);
        return { slot, replaced: null };
      }
    }
    const coldest = index.coldest();
    if (coldest === undefined) return undefined;
    busy.add(coldest.slot);
    onEvicted(index.drop(coldest)); // first: nobody should look for its blocks while it goes
    // In one request, where the server can: no moment at which another node could take the place.
    if (api.canReplace) return { slot: coldest.slot, replaced: coldest.etag };
    try {
      await api.delete(packKey(coldest.slot), deadlineMs);
      return { slot: coldest.slot, replaced: null };
    } catch (error) {
      busy.delete(coldest.slot);
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

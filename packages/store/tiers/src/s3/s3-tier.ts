/**
 * The S3 tier: immutable packs in a bucket that any number of nodes share under one budget, without a coordinator.
 *
 *     write ──PackWriter──▶ PUT v1/packs/NNNNNNNN, If-None-Match: *      (pack-writer.ts: why the budget holds)
 *     read  ──PackIndex──▶ pack, offset ──PackReader──▶ ranged GET, If-Match ──▶ arena slot ──▶ verified
 *     Discovery ──LIST──▶ other nodes' packs come and go
 *
 * Invariants (law 1 to 3): what is delivered was verified; nothing outlasts its time limit; at most packCount × packBytes lie
 * under the prefix. A server that does not answer takes the tier out of service, and `RequestBreaker` brings it back; one that refuses
 * writes is read on (`WriteRefusals`).
 */

import { native } from '@kvtier/data-plane';
import { invariant, KvError } from '@kvtier/errors';
import { decodeHeader, type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  SlotSizes,
  Tier,
  TierChange,
  TierStats,
  TierSupports,
  WriteStatus,
} from '../kit/tier.ts';
import { Discovery, packKey } from './discovery.ts';
import { checkBucket, checkWrites, orRefusal } from './opening.ts';
import { planS3, type S3Plan, type S3TierOptions } from './options.ts';
import { type Pack, type PackEntry, PackIndex } from './pack-index.ts';
import { PackReader, type WantedBlock } from './pack-reader.ts';
import { type PackJob, PackWriter } from './pack-writer.ts';
import { RequestBreaker } from './request-breaker.ts';
import { S3Api, type S3ApiOptions } from './s3-api.ts';
import { WriteRefusals } from './write-refusals.ts';

/** What an orderly end leaves to packs that are being stored. */
const closingMs = 2_000;

export class S3Tier implements Tier {
  readonly name = 's3';
  readonly supports: TierSupports;
  readonly #options: S3TierOptions;
  readonly #plan: S3Plan;
  readonly #index: PackIndex;
  readonly #api: S3Api;
  readonly #breaker: RequestBreaker;
  readonly #refusals: WriteRefusals;
  readonly #discovery: Discovery;
  readonly #writer: PackWriter;
  readonly #reader: PackReader;
  /** Writes in flight by namespace and hash, with who else waits for them: one block is not written twice. */
  readonly #writing = new Map<string, ((stored: boolean) => void)[]>();
  readonly #background = new Set<Promise<unknown>>();
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };
  /** Packs with blocks that were unlisted for this node alone. */
  readonly #wantedElsewhere = new WeakSet<Pack>();
  #foreignBlocks = 0;
  #listing: Promise<void> | undefined;
  /** The pass that runs; never rejects. */
  #pass: Promise<void> = Promise.resolve();
  #refreshTimer: NodeJS.Timeout | undefined;
  #closed = false;

  /**
   * Check the bucket and list it. The blocks of its packs are found soon after, however many there are, and whoever waits to start
   * waits for none of them. One that takes no writes is opened to be read. KvError CONFIG, in one line, when it cannot work; with
   * `retry`, when it may later.
   */
  static async open(options: S3TierOptions): Promise<S3Tier> {
    const plan = planS3(options);
    const holder: { tier?: S3Tier } = {};
    const api = await S3Api.open({
      plan,
      onTry: (...tried) => holder.tier === undefined || holder.tier.#noted(...tried),
      suspended: () => (holder.tier === undefined ? undefined : holder.tier.#breaker.suspended),
    });
    try {
      const deadlineMs = performance.now() + plan.timeLimitMs;
      let refused: KvError | undefined;
      const tier = await orRefusal(plan, async () => {
        refused = await checkBucket(api, plan, deadlineMs, options.isReadOnly === true);
        const opened = new S3Tier(options, plan, api);
        const listing = opened.#list();
        await atMost(deadlineMs - performance.now(), listing);
        void opened.#goOn(listing);
        return opened;
      });
      holder.tier = tier;
      const at = `${plan.url.origin}/${plan.bucket}/${plan.prefix}`;
      const packs = plan.packCount - tier.#discovery.free.size;
      options.log.info({ at, packs, packCount: plan.packCount }, 'the s3 tier is open');
      if (refused !== undefined) tier.#refusals.refusedAtStart(refused, (limitMs) => checkWrites(api, plan, limitMs));
      return tier;
    } catch (error) {
      api.close();
      throw error;
    }
  }

  private constructor(options: S3TierOptions, plan: S3Plan, api: S3Api) {
    const { arena, memory, log } = options;
    this.supports = { persistent: true, shared: true, writable: options.isReadOnly !== true, evicts: true };
    this.#options = options;
    this.#plan = plan;
    this.#api = api;
    const index = new PackIndex(plan.maxBlocks);
    this.#index = index;
    const onEvicted = (blockCount: number): void => {
      this.#counts.evictions += blockCount;
    };
    this.#breaker = new RequestBreaker({
      onOpen: (reason) => {
        index.hide();
        this.#discovery.cutShort();
        log.error({ tier: this.name, reason }, 'the s3 tier is out of service until its server answers again');
      },
      probe: () => this.#list(),
      onClosed: () => {
        index.show();
        log.info({ tier: this.name, blocks: index.count }, 'the s3 tier is back in service');
      },
    });
    const shared = { plan, api, index, log, onEvicted };
    this.#discovery = new Discovery(shared);
    const refusals = new WriteRefusals(log);
    this.#refusals = refusals;
    this.#writer = new PackWriter({ ...shared, discovery: this.#discovery, memory, refusals });
    this.#reader = new PackReader({
      ...{ api, arena, memory },
      onGone: (pack) => {
        if (index.packs.get(pack.slot) === pack) index.drop(pack);
      },
      onRefused: (pack, why) => this.#putAway(pack, why),
      onCorrupt: (entry) => this.#forget(entry, 'corrupt'),
      onForeign: (entry) => this.#unlistHere(entry, 'foreign'),
    });
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const held = this.#closed ? 0 : this.#index.prefix(namespace, hashes);
    this.#counts.hits += held;
    if (held < hashes.length) this.#counts.misses++;
    return held;
  }

  /** Whole packs are as recent as the last use of any of their blocks. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    for (let at = hashes.length - 1; at >= 0; at--) {
      const entry = this.#index.get(namespace, hashes[at]!);
      if (entry !== undefined) this.#index.touch(entry.pack);
    }
  }

  write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    return new Promise((resolve) => {
      const statuses: WriteStatus[] = [];
      let open = blocks.length;
      const end = (index: number, status: WriteStatus): void => {
        if (status === 'refused') this.#counts.refused++;
        statuses[index] = status;
        if (--open === 0) resolve(statuses);
      };
      if (open === 0) resolve(statuses);
      const jobs: PackJob[] = [];
      let jobBytes = 0;
      for (const [index, { hash, slot }] of blocks.entries()) {
        const entry = this.#index.get(namespace, hash);
        const key = namespace.key + hash;
        const others = this.#writing.get(key);
        const bytes = this.#objectBytes(namespace, hash, slot);
        if (!this.#inService) end(index, 'refused');
        else if (entry !== undefined) {
          this.#index.touch(entry.pack);
          end(index, 'held');
        } else if (others !== undefined) others.push((stored) => end(index, stored ? 'held' : 'refused'));
        else if (!this.supports.writable || !this.#refusals.mayTry) end(index, 'refused');
        else if (bytes === undefined || !this.#writer.fits(bytes) || !this.#writer.hasRoom(jobBytes + bytes)) {
          end(index, 'refused');
        } else {
          jobBytes += bytes;
          const waiters: ((stored: boolean) => void)[] = [];
          this.#writing.set(key, waiters);
          const onDone = (stored: boolean): void => {
            this.#writing.delete(key);
            end(index, stored ? 'stored' : 'refused');
            for (const tell of waiters) tell(stored);
          };
          jobs.push({ namespace, hash, slot, bytes, onDone });
        }
      }
      for (const job of jobs) this.#writer.append(job);
    });
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes: SlotSizes = 'known',
  ): Promise<void> {
    const wanted: WantedBlock[] = [];
    for (const [index, { hash, slot }] of blocks.entries()) {
      const entry = this.#inService ? this.#index.get(namespace, hash) : undefined;
      if (entry === undefined) onDone(index, 'missing');
      else if (entry.bytes > this.#options.slots.slotBytesOf(slot)) {
        if (sizes === 'known') this.remove(namespace, [hash], 'misfit');
        onDone(index, 'missing');
      } else {
        this.#index.touch(entry.pack);
        wanted.push({ index, slot, entry });
      }
    }
    const reading = this.#reader.read(wanted, performance.now() + this.#plan.timeLimitMs, onDone);
    this.#keep(reading);
    await reading;
  }

  /** Lasting on this node as long as the pack does; other nodes, and this one after a restart, find a block by its own checksum. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    let count = 0;
    for (const hash of hashes) {
      const entry = this.#index.get(namespace, hash);
      if (entry === undefined) continue;
      count++;
      if (reason === 'misfit' || reason === 'foreign') this.#unlistHere(entry, reason);
      else this.#forget(entry, reason);
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
    const { packs, toldCount, storedBytes, leftOutCount, bytes: indexBytes } = this.#index;
    const refused = this.#refusals.reason;
    return {
      tier: this.name,
      blocks: this.#closed ? 0 : toldCount,
      bytes: (this.#plan.packCount - this.#discovery.free.size) * this.#plan.packBytes,
      capacityBytes: this.#plan.capacityBytes,
      ...this.#counts,
      inService: this.#inService,
      outOfServiceReason: this.#breaker.reason || (refused === '' ? '' : `writes are refused: ${refused}`),
      detail: {
        writes_refused: refused === '' ? 0 : 1,
        packs: packs.size,
        pack_slots: this.#plan.packCount,
        stored_bytes: storedBytes,
        left_out_blocks: leftOutCount,
        index_bytes: indexBytes,
        foreign_objects: this.#discovery.foreignCount,
        foreign_blocks: this.#foreignBlocks,
        unreadable_packs: this.#discovery.unreadableCount,
        requests: this.#api.requestCount,
        retries: this.#api.retryCount,
      },
    };
  }

  checkIntegrity(): void {
    this.#index.checkIntegrity();
    const { free, busy } = this.#discovery;
    for (const [slot, pack] of this.#index.packs) {
      invariant(!free.has(slot), 's3: a pack lies in a free slot');
      invariant(slot < this.#plan.packCount && pack.bytes <= this.#plan.packBytes, 's3: a pack outside the budget');
    }
    for (const slot of busy) invariant(!free.has(slot), 's3: a busy slot is free');
    invariant(this.stats().bytes <= this.#plan.capacityBytes, 's3: over its capacity');
  }

  /** Does not wait for a server that is silent: what is asked of it then ends here. */
  async close(): Promise<void> {
    if (this.#closed) return;
    await atMost(closingMs, this.#writer.idle());
    this.#closed = true;
    clearTimeout(this.#refreshTimer);
    this.#breaker.stop();
    this.#index.close();
    this.#api.close();
    await this.#writer.idle();
    while (this.#background.size > 0) await Promise.allSettled(this.#background);
    await this.#listing?.catch(() => {});
    await this.#pass;
  }

  /**
   * That a write went well says that the server is there, and that one had no answer that it may be gone; that one was refused says
   * nothing of what else it does.
   */
  #noted(...[failure, object, isWrite, isAnswered]: Parameters<S3ApiOptions['onTry']>): void {
    if (isWrite) this.#refusals.noted(failure);
    if (!isWrite || failure === undefined || !isAnswered) this.#breaker.noted(failure, object);
  }

  get #inService(): boolean {
    return !this.#index.hidden && !this.#closed;
  }

  /** Bytes of the object in a slot; undefined: it is not the one that the slot is said to hold. */
  #objectBytes(namespace: Namespace, hash: HashKey, slot: number): number | undefined {
    const header = decodeHeader(native.arenaRead(this.#options.arena, slot, headerBytes));
    if ('error' in header || header.hash !== hash) return undefined;
    if (Buffer.compare(header.namespace, namespace.digest) !== 0) return undefined;
    const bytes = headerBytes + header.payloadBytes;
    return bytes <= this.#options.slots.slotBytesOf(slot) ? bytes : undefined;
  }

  /**
   * Other nodes may know it as it is: it is unlisted here alone, or this node would say that it is held, and make its name nowhere. Its
   * pack stays, even with nothing else in it.
   */
  #unlistHere(entry: PackEntry, reason: 'misfit' | 'foreign'): void {
    if (!entry.listed) return;
    this.#index.remove(entry);
    this.#wantedElsewhere.add(entry.pack);
    if (reason === 'foreign') this.#foreignBlocks++;
  }

  #forget(entry: PackEntry, reason: 'corrupt' | 'evicted' | 'asked'): void {
    if (!entry.listed) return;
    this.#index.remove(entry);
    if (reason === 'corrupt') this.#counts.corrupt++;
    if (reason === 'evicted') this.#counts.evictions++;
    // What it has beyond the bound of the index, or of a newer program's, may be wanted by others.
    if (this.#wantedElsewhere.has(entry.pack)) return;
    if (entry.pack.listedCount + entry.pack.leftOutCount === 0) this.#keep(this.#retire(entry.pack));
  }

  /** Nothing in it is wanted any more. Fails quietly: a later pass finds it again. */
  async #retire(pack: Pack): Promise<void> {
    const { free, busy } = this.#discovery;
    if (this.#index.packs.get(pack.slot) !== pack || busy.has(pack.slot)) return;
    this.#index.drop(pack);
    busy.add(pack.slot);
    try {
      await this.#api.delete(packKey(pack.slot), performance.now() + this.#plan.timeLimitMs);
      free.add(pack.slot);
    } catch (error) {
      this.#discovery.notDeleted(pack.slot, pack.etag, KvError.from(error));
    } finally {
      busy.delete(pack.slot);
    }
  }

  /**
   * It was readable, and is no more (no permission any more, moved to where it takes hours to read): its blocks are misses, and it is left
   * alone as one whose table cannot be read. false: the server is gone, which says nothing of the pack.
   */
  #putAway(pack: Pack, why: KvError): boolean {
    if (!this.#inService) return false;
    if (this.#index.packs.get(pack.slot) !== pack) return true; // by another read
    this.#index.drop(pack);
    this.#discovery.leaveAlone(pack.slot, pack.etag, why);
    this.#options.log.warn({ reason: why.message }, 's3: a pack cannot be read any more and is left alone for a while');
    return true;
  }

  #keep(work: Promise<unknown>): void {
    const kept: Promise<unknown> = work.finally(() => this.#background.delete(kept));
    this.#background.add(kept);
    kept.catch(() => {}); // whoever called hears of it
  }

  /** One pass at a time. Settles when the bucket is listed; what is new there is read after that. */
  #list(): Promise<void> {
    // Thousands of tables may be left to the pass before: whether the server is back is not to wait for them.
    if (this.#breaker.reason !== '') this.#discovery.cutShort();
    this.#listing ??= this.#pass
      .then(
        () =>
          new Promise<void>((resolve, reject) => {
            this.#pass = this.#refresh(resolve).catch(reject);
          }),
      )
      .finally(() => {
        this.#listing = undefined;
      });
    return this.#listing;
  }

  /** Rejects when the bucket cannot be listed. Behind its listing nobody waits for the pass, who could hear of a defect. */
  async #refresh(onListed: () => void): Promise<void> {
    let isListed = false;
    try {
      await this.#discovery.refresh(() => {
        isListed = true;
        onListed();
      });
    } catch (error) {
      if (!isListed) throw error;
      const { message: reason } = KvError.from(error);
      this.#options.log.error({ tier: this.name, reason }, 's3: a pass over the bucket ended early, by a defect');
    }
  }

  /** After a listing that was begun: to the end of its pass, then pass after pass. */
  async #goOn(listing: Promise<void>): Promise<void> {
    try {
      await listing;
    } catch (error) {
      // Counted by the breaker, or an answer that is no listing.
      if (!this.#closed)
        this.#options.log.warn({ reason: KvError.from(error).message }, 's3: the bucket could not be listed');
    }
    await this.#pass;
    if (this.#closed) return;
    const waitMs =
      Math.max(this.#plan.refreshMs, 1000 * (this.#discovery.listingPages - 1)) * (0.8 + 0.4 * Math.random());
    this.#refreshTimer = setTimeout(() => {
      // Out of service the breaker looks by itself.
      void this.#goOn(this.#breaker.reason === '' ? this.#list() : Promise.resolve());
    }, waitMs).unref();
  }
}

/** Settles as `work` does, or fulfilled when that takes longer. */
async function atMost(limitMs: number, work: Promise<unknown>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const end = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, Math.max(1, limitMs));
  });
  try {
    await Promise.race([work, end]);
  } finally {
    clearTimeout(timer);
  }
}

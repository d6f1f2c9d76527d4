/**
 * Promotion: brings blocks from lower tiers into arena slots, for all loads at once.
 *
 *     loads (ring) ──take──▶ fetches (one per block, shared) ──batches──▶ tier.read ──▶ arena.publish ──▶ waiting loads
 *
 * Invariants: one read per block, however many loads wait for it (single flight); at most `maxFetchBytes` in flight;
 * loads take turns, one batch each, so that a long one cannot starve a short one; a slot is published or freed exactly
 * once, whether anyone still waits or not. Loads are told in the same turn in which a block is published, so that they
 * can pin it before anything can evict it.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { ReadStatus, Tier } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import type { Failpoint } from './failpoints.ts';
import type { StoreLimits } from './limits.ts';
import type { NamespaceState } from './namespaces.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop, Clock, Log, ReadHeader } from './ports.ts';
import { RateMeter } from './rate.ts';

/** Why a block did not arrive, in the words of LoadDone. */
export type FetchFailure = 'missing' | 'corrupt' | 'capacity' | 'tier';

export interface FetchRequest {
  /** The caller's own, given back. */
  readonly index: number;
  readonly hash: HashKey;
  readonly tier: Tier;
}

/** A load, as the fetcher sees it. */
export interface FetchClient {
  readonly state: NamespaceState;
  /** Up to `count` blocks that it wants next, in chain order; none: it leaves the ring. */
  take(count: number): FetchRequest[];
  /** The block is in the arena now: pin it in this call. */
  arrived(index: number, tier: string): void;
  failed(index: number, reason: FetchFailure): void;
}

export interface Fetch {
  readonly hash: HashKey;
  readonly slot: number;
  readonly tier: Tier;
  readonly waiters: { readonly client: FetchClient; readonly index: number }[];
}

export interface FetcherOptions {
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly lower: readonly Tier[];
  readonly readHeader: ReadHeader;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  readonly failpoint: Failpoint | undefined;
}

const failures: Record<Exclude<ReadStatus, 'ready'>, FetchFailure> = {
  missing: 'missing',
  corrupt: 'corrupt',
  failed: 'tier',
};

/** Believed of a lower tier until it has been measured: a middling NVMe drive. */
const firstGuess = { bytesPerUs: 1000, latencyUs: 300 };

export class Fetcher {
  readonly #options: FetcherOptions;
  readonly #ring: FetchClient[] = [];
  readonly #rates = new Map<string, RateMeter>();
  /** Start times of the reads in flight, oldest first, per tier. */
  readonly #reads = new Map<string, Set<number>>();
  readonly #onQuiet: () => void;
  #inFlightBytes = 0;
  #pumping = false;

  /** @param onQuiet called when the last load has been served: the time for background work */
  constructor(options: FetcherOptions, onQuiet: () => void) {
    this.#options = options;
    this.#onQuiet = onQuiet;
    for (const tier of options.lower) {
      this.#rates.set(tier.name, new RateMeter(firstGuess));
      this.#reads.set(tier.name, new Set());
    }
  }

  get inFlightBytes(): number {
    return this.#inFlightBytes;
  }

  /** Something is being loaded, or waits to be. */
  get hasDemand(): boolean {
    return this.#inFlightBytes > 0 || this.#ring.length > 0;
  }

  estimateUs(tier: string, bytes: number): number {
    return this.#rates.get(tier)!.estimateUs(bytes, this.#inFlightBytes);
  }

  /** A read of this tier has not been answered for too long: new loads do not wait for it. */
  isStuck(tier: Tier): boolean {
    const oldest = this.#reads.get(tier.name)!.values().next();
    return !oldest.done && this.#options.clock.nowUs() - oldest.value > this.#options.limits.stuckReadMs * 1000;
  }

  /** Serve this load until its `take` returns nothing. */
  add(client: FetchClient): void {
    this.#ring.push(client);
    this.#pump();
  }

  #pump(): void {
    if (this.#pumping) return; // a client's callback came back here: the loop below goes on anyway
    this.#pumping = true;
    const { limits } = this.#options;
    while (this.#ring.length > 0 && this.#inFlightBytes < limits.maxFetchBytes) {
      const client = this.#ring.shift()!;
      const { payloadBytes } = client.state;
      const bytes = Math.min(limits.fetchBatchBytes, limits.maxFetchBytes - this.#inFlightBytes);
      const requests = client.take(Math.max(1, Math.floor(bytes / payloadBytes)));
      if (requests.length === 0) continue;
      this.#start(client, requests);
      this.#ring.push(client);
    }
    this.#pumping = false;
    if (!this.hasDemand) this.#onQuiet();
  }

  #start(client: FetchClient, requests: readonly FetchRequest[]): void {
    const { arena, counters } = this.#options;
    const { namespace, payloadBytes, fetching } = client.state;
    const batches = new Map<Tier, Fetch[]>();
    for (const { index, hash, tier } of requests) {
      if (arena.get(namespace, hash)?.payloadBytes === payloadBytes) {
        client.arrived(index, arena.name); // another load has brought it meanwhile
        continue;
      }
      const shared = fetching.get(hash);
      if (shared !== undefined) {
        counters.add('load.blocks.shared_read');
        shared.waiters.push({ client, index });
        continue;
      }
      const slot = arena.allocate(namespace, payloadBytes);
      if (slot === undefined) {
        counters.add('load.refused.capacity');
        client.failed(index, 'capacity');
        break; // the rest of this batch lies behind the gap
      }
      const fetch: Fetch = { hash, slot, tier, waiters: [{ client, index }] };
      fetching.set(hash, fetch);
      this.#inFlightBytes += payloadBytes;
      const batch = batches.get(tier);
      if (batch === undefined) batches.set(tier, [fetch]);
      else batch.push(fetch);
    }
    for (const [tier, batch] of batches) void this.#read(client.state, tier, batch);
  }

  /** Never rejects. */
  async #read(state: NamespaceState, tier: Tier, batch: readonly Fetch[]): Promise<void> {
    const { clock, log, failpoint } = this.#options;
    const rate = this.#rates.get(tier.name)!;
    const reads = this.#reads.get(tier.name)!;
    let startUs = clock.nowUs();
    while (reads.has(startUs)) startUs += 0.001;
    reads.add(startUs);
    rate.start(startUs);
    const open = new Set(batch);
    let readyBytes = 0;
    try {
      failpoint?.('store.load.read');
      await tier.read(state.namespace, batch, (index, status) => {
        const fetch = batch[index]!;
        if (!open.delete(fetch)) return;
        if (status === 'ready') readyBytes += state.payloadBytes;
        this.#settle(state, fetch, status);
      });
    } catch (error) {
      log.error(
        { tier: tier.name, reason: KvError.from(error).message },
        'a read of a tier threw; its blocks count as failed',
      );
    }
    for (const fetch of open) this.#settle(state, fetch, 'failed');
    reads.delete(startUs);
    rate.end(clock.nowUs(), startUs, readyBytes);
    this.#pump();
  }

  #settle(state: NamespaceState, fetch: Fetch, read: ReadStatus): void {
    const { arena, pins, counters, readHeader, failpoint } = this.#options;
    state.fetching.delete(fetch.hash);
    this.#inFlightBytes -= state.payloadBytes;
    const header = read === 'ready' ? readHeader(fetch.slot) : undefined;
    // The tier has verified all of it; the size is what this session's slots and offsets were made for.
    const usable = header?.payloadBytes === state.payloadBytes && !pins.isLeaving(state.namespace, fetch.hash);
    const status = read === 'ready' && !usable ? 'corrupt' : read;
    // A foreign layout: removed, or it would count as held, and keep its name from being written, for ever.
    if (header !== undefined && header.payloadBytes !== state.payloadBytes) {
      fetch.tier.remove(state.namespace, [fetch.hash], 'corrupt');
    }
    if (header !== undefined && status === 'ready') {
      if (arena.get(state.namespace, fetch.hash) === undefined) {
        arena.publish(state.namespace, header, fetch.slot);
        failpoint?.('store.load.published');
      } else arena.free(fetch.slot); // a writer was faster
      counters.add(`load.blocks.from.${fetch.tier.name}`);
      for (const { client, index } of fetch.waiters) client.arrived(index, fetch.tier.name);
      return;
    }
    arena.free(fetch.slot);
    counters.add(`load.failed.${failures[status as keyof typeof failures]}`);
    for (const { client, index } of fetch.waiters) client.failed(index, failures[status as keyof typeof failures]);
  }
}

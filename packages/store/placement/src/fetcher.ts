/**
 * Promotion: brings blocks from lower tiers into arena slots, for all loads and prefetches at once.
 *
 *     clients (fetch-turns.ts) ──next──▶ fetches (one per block, shared) ──batches──▶ tier.read ──▶ arena.publish
 *                                                     └── failed: the next tier that holds the block ◀──┘     └──▶ waiting clients
 *
 * Invariants: one read per block, however many wait for it (single flight), but where the tier that reads it does not answer any more
 * and another one holds it: that one reads it, too, and all who wait are its from then on; what is in flight is bounded per tier (see
 * tier-gate.ts); clients take turns (fetch-turns.ts), so that a long one cannot starve a short one, and none takes a turn of the event
 * loop for what needs no read; a slot is published or freed
 * exactly once, whether anyone still waits or not, and never while a tier may still write to it. Clients are told in the same turn in which a block is published, so that
 * they can pin it before anything can evict it.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type { ReadStatus } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import type { Failpoint } from './failpoints.ts';
import { FetchTurns, type Served } from './fetch-turns.ts';
import type { Fetch, FetchClient, FetchFailure, NamespaceState } from './fetches.ts';
import type { StoreLimits } from './limits.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop, ReadHeader } from './ports.ts';
import { stepping } from './steps.ts';
import type { Tenants } from './tenants.ts';
import type { ReadPriority, TierGate } from './tier-gate.ts';

export interface FetcherOptions {
  readonly arena: ArenaTop;
  readonly pins: Pick<Pins, 'isLeaving'>;
  readonly readHeader: ReadHeader;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  readonly tenants: Pick<Tenants, 'reserve' | 'settle' | 'during'>;
  /** Who pays for a block already; 0: nobody. */
  readonly ownerOf: (namespace: Namespace, hash: HashKey) => number;
  /** The end of an object is over. */
  readonly isOver: (expiresS: number) => boolean;
  readonly failpoint: Failpoint | undefined;
  /** The fastest lower tier that holds the block and answers, but for those in `tried`. */
  readonly locate: (state: NamespaceState, hash: HashKey, tried: number) => TierGate | undefined;
  /** A block has come from a lower tier and is in the arena. */
  readonly onPromoted: (state: NamespaceState, hash: HashKey, from: TierGate) => void;
  /** Reads have ended: there may be time for background work. */
  readonly onIdle: () => void;
}

const failures: Record<Exclude<ReadStatus, 'ready'>, FetchFailure> = {
  missing: 'missing',
  corrupt: 'corrupt',
  failed: 'tier',
};

export class Fetcher {
  readonly #options: FetcherOptions;
  readonly #turns: Record<ReadPriority, FetchTurns> = { demand: new FetchTurns(), prefetch: new FetchTurns() };
  /** Reads that failed and are tried elsewhere, batched over one turn. */
  readonly #retries = new Map<NamespaceState, Fetch[]>();
  #inFlightBytes = 0;
  /** Slots of reads that a tier broke off; each cancels the timer that gives it back. */
  readonly #abandoned = new Set<() => void>();
  #pumping = false;
  /** Blocks of this turn that need no read of their own. */
  #passedOver = 0;
  /** A turn had no time to pass over more. */
  #cancelNextTurn: (() => void) | undefined;

  constructor(options: FetcherOptions) {
    this.#options = options;
  }

  get inFlightBytes(): number {
    return this.#inFlightBytes;
  }

  /** Slots of broken reads stay taken: the arena goes, too. */
  close(): void {
    for (const cancel of this.#abandoned) cancel();
    this.#abandoned.clear();
    this.#cancelNextTurn?.();
    this.#cancelNextTurn = undefined;
  }

  /** Serve this client until its `next` returns nothing. */
  add(client: FetchClient): void {
    this.#turns[client.priority].add(client);
    this.pump();
  }

  /** Start what may be started now. */
  pump(): void {
    if (this.#pumping) return; // a client's callback came back here: the loop below goes on anyway
    if (this.#cancelNextTurn !== undefined) return;
    this.#pumping = true;
    this.#passedOver = 0;
    const serving = {
      serve: (client: FetchClient, isFirst: (gate: TierGate) => boolean) => this.#serve(client, isFirst),
      isTurnOver: () => this.#isTurnOver,
    };
    this.#turns.demand.serve(serving);
    this.#turns.prefetch.serve(serving);
    this.#pumping = false;
    if (this.#isTurnOver) {
      this.#cancelNextTurn = this.#options.clock.after(0, () => {
        this.#cancelNextTurn = undefined;
        this.pump();
      });
    }
    this.#options.onIdle();
  }

  get #isTurnOver(): boolean {
    return this.#passedOver >= stepping.looked;
  }

  /** One batch of one client. */
  #serve(client: FetchClient, isFirst: (gate: TierGate) => boolean): Served {
    const { arena, counters, limits, locate, tenants, ownerOf } = this.#options;
    const { state, priority } = client;
    const { namespace, payloadBytes, fetching } = state;
    const batches = new Map<TierGate, Fetch[]>();
    let outcome: Served = 'done';
    let bytes = 0;
    for (let request = client.next(); request !== undefined; request = client.next()) {
      if (this.#isTurnOver) {
        outcome = 'started';
        break;
      }
      const { index, hash } = request;
      if (this.#isInArena(state, hash)) {
        this.#passedOver++;
        client.advance();
        client.arrived(index, arena.name); // another client has brought it meanwhile
        continue;
      }
      const shared = fetching.get(hash);
      const gate = shared?.gate.available ? undefined : locate(state, hash, 0);
      if (shared !== undefined && gate === undefined) {
        this.#passedOver++;
        client.advance();
        counters.add('load.blocks.shared_read');
        shared.waiters.push({ client, index });
        continue;
      }
      if (gate === undefined) {
        this.#passedOver++;
        client.advance();
        client.failed(index, 'missing');
        continue;
      }
      if (bytes > 0 && bytes + payloadBytes > limits.fetchBatchBytes) {
        outcome = 'started';
        break;
      }
      if (!isFirst(gate) || !gate.mayRead(payloadBytes, priority)) {
        outcome = bytes > 0 ? 'started' : gate;
        break;
      }
      client.advance();
      const tenant = ownerOf(namespace, hash) || client.tenant;
      const mayHave = tenants.reserve(tenant, 0, payloadBytes);
      const slot = mayHave ? arena.allocate(namespace, payloadBytes) : undefined;
      if (slot === undefined) {
        if (mayHave) tenants.settle(tenant, 0, payloadBytes);
        counters.add('load.refused.capacity');
        this.#passedOver++;
        client.failed(index, 'capacity');
        continue;
      }
      if (shared !== undefined) counters.add(`load.retried.${gate.tier.name}`);
      const waiters = [...(shared?.waiters.splice(0) ?? []), { client, index }];
      const fetch: Fetch = { hash, slot, priority, tenant, gate, tried: 0, waiters };
      fetching.set(hash, fetch);
      this.#inFlightBytes += payloadBytes;
      gate.began(payloadBytes, priority);
      bytes += payloadBytes;
      const batch = batches.get(gate);
      if (batch === undefined) batches.set(gate, [fetch]);
      else batch.push(fetch);
    }
    for (const [gate, batch] of batches) void this.#read(state, gate, batch);
    return outcome;
  }

  /** Never rejects. */
  async #read(state: NamespaceState, gate: TierGate, batch: readonly Fetch[]): Promise<void> {
    const { log, failpoint } = this.#options;
    const startUs = gate.readStarted();
    const open = new Set(batch);
    let readyBytes = 0;
    let failedCount = 0;
    const settle = (fetch: Fetch, status: ReadStatus): void => {
      if (!open.delete(fetch)) return;
      if (status === 'ready') readyBytes += state.payloadBytes;
      if (status === 'failed') failedCount++;
      this.#settle(state, gate, fetch, status);
    };
    try {
      failpoint?.('store.load.read');
      await gate.tier.read(state.namespace, batch, (index, status) => settle(batch[index]!, status));
    } catch (error) {
      log.error(
        { tier: gate.tier.name, reason: KvError.from(error).message },
        'a read of a tier threw; its blocks count as failed',
      );
      failedCount += open.size;
      for (const fetch of open) this.#abandon(state, gate, fetch);
      open.clear();
    }
    for (const fetch of open) settle(fetch, 'failed');
    gate.ended({ startUs, readyBytes, failedCount });
    this.pump();
  }

  /** One block of a read has ended. */
  #settle(state: NamespaceState, gate: TierGate, fetch: Fetch, read: ReadStatus): void {
    const { arena, pins, counters, readHeader, failpoint, onPromoted, isOver } = this.#options;
    const { namespace, payloadBytes } = state;
    gate.settled(payloadBytes, fetch.priority);
    const header = read === 'ready' ? readHeader(fetch.slot) : undefined;
    const isLeaving = pins.isLeaving(namespace, fetch.hash);
    // The tier has verified all of it; the size is what this session's slots and offsets were made for.
    const usable = header?.payloadBytes === payloadBytes && !isLeaving;
    const over = isOver(header?.expiresS ?? 0);
    const status = over ? 'missing' : read === 'ready' && !usable ? 'corrupt' : read;
    // Its own header says so, whoever wrote it and however old this node's view is.
    if (over) {
      counters.add(`load.expired.${gate.tier.name}`);
      gate.tier.remove(namespace, [fetch.hash], 'asked');
    } // A foreign layout, or no object at all: removed, or it would count as held, and keep its name from being written, for ever.
    else if (read === 'ready' && header?.payloadBytes !== payloadBytes) {
      gate.tier.remove(namespace, [fetch.hash], 'corrupt');
    }
    if (header !== undefined && status === 'ready') {
      this.#end(state, fetch);
      if (arena.get(namespace, fetch.hash) === undefined) {
        this.#options.tenants.during(fetch.tenant, () => arena.publish(namespace, header, fetch.slot));
        failpoint?.('store.load.published');
      } else arena.free(fetch.slot); // a writer was faster
      counters.add(`load.blocks.from.${gate.tier.name}`);
      // Of a tier that hung and has been faster all the same: who waits for the other one has the block, too.
      const others = state.fetching.get(fetch.hash)?.waiters.splice(0) ?? [];
      for (const { client, index } of [...fetch.waiters, ...others]) client.arrived(index, gate.tier.name);
      onPromoted(state, fetch.hash, gate);
      return;
    }
    const reason = failures[status as keyof typeof failures];
    counters.add(`load.failed.${reason}`);
    if (!isLeaving && this.#tryElsewhere(state, fetch)) return;
    this.#end(state, fetch);
    arena.free(fetch.slot);
    this.#tellFailed(state, fetch, reason);
  }

  /** That no tier gave the block, unless a writer was faster. */
  #tellFailed(state: NamespaceState, { hash, waiters }: Fetch, reason: FetchFailure): void {
    const { arena, pins } = this.#options;
    const isThere = this.#isInArena(state, hash) && !pins.isLeaving(state.namespace, hash);
    for (const { client, index } of waiters) {
      if (isThere) client.arrived(index, arena.name);
      else client.failed(index, reason);
    }
  }

  #isInArena({ namespace, payloadBytes }: NamespaceState, hash: HashKey): boolean {
    const { arena, isOver } = this.#options;
    const block = arena.get(namespace, hash);
    return block?.payloadBytes === payloadBytes && !isOver(block.expiresS);
  }

  /**
   * The tier has a defect, so its word that nothing arrives any more is not taken: nobody waits for the block, but its slot, and
   * the room that it has in the tier's share, are given back when even the slowest read would have ended.
   */
  #abandon(state: NamespaceState, gate: TierGate, fetch: Fetch): void {
    const { arena, clock, counters, limits, tenants } = this.#options;
    const { payloadBytes } = state;
    counters.add('load.failed.tier');
    this.#forget(state, fetch);
    tenants.settle(fetch.tenant, 0, payloadBytes);
    const cancel = clock.after(limits.brokenReadMs, () => {
      this.#abandoned.delete(cancel);
      gate.settled(payloadBytes, fetch.priority);
      this.#inFlightBytes -= payloadBytes;
      arena.free(fetch.slot);
      this.pump();
    });
    this.#abandoned.add(cancel);
    this.#tellFailed(state, fetch, 'tier');
  }

  /** Another read of the block may have taken its place. */
  #forget({ fetching }: NamespaceState, fetch: Fetch): void {
    if (fetching.get(fetch.hash) === fetch) fetching.delete(fetch.hash);
  }

  #end(state: NamespaceState, fetch: Fetch): void {
    this.#forget(state, fetch);
    this.#inFlightBytes -= state.payloadBytes;
    this.#options.tenants.settle(fetch.tenant, 0, state.payloadBytes);
  }

  /** Another tier holds the block and somebody still waits for it: read it there, into the same slot. */
  #tryElsewhere(state: NamespaceState, fetch: Fetch): boolean {
    const { counters, locate } = this.#options;
    fetch.tried |= 1 << fetch.gate.bit;
    if (!fetch.waiters.some(({ client, index }) => client.wants(index)) || this.#isInArena(state, fetch.hash))
      return false;
    const gate = locate(state, fetch.hash, fetch.tried);
    if (gate === undefined) return false;
    counters.add(`load.retried.${gate.tier.name}`);
    fetch.gate = gate;
    gate.began(state.payloadBytes, fetch.priority);
    if (this.#retries.size === 0) queueMicrotask(() => this.#flushRetries());
    const retries = this.#retries.get(state);
    if (retries === undefined) this.#retries.set(state, [fetch]);
    else retries.push(fetch);
    return true;
  }

  /** A tier may fail a block before its `read` returns: whatever is tried yet again is of the next flush. */
  #flushRetries(): void {
    const batches: { readonly state: NamespaceState; readonly gate: TierGate; readonly batch: readonly Fetch[] }[] = [];
    for (const [state, fetches] of this.#retries) {
      for (const gate of new Set(fetches.map((fetch) => fetch.gate))) {
        batches.push({ state, gate, batch: fetches.filter((fetch) => fetch.gate === gate) });
      }
    }
    this.#retries.clear();
    for (const { state, gate, batch } of batches) void this.#read(state, gate, batch);
  }
}

/**
 * What one session holds of the store: slots reserved for writing, leases for reading, pins.
 *
 * Life of a slot:   session-writes.ts
 * Life of a lease:  load → ready … → release
 *
 * Invariants: everything here belongs to exactly one session and is bounded; a block becomes visible only by `commit` of
 * the session that reserved it, never by abort or by a broken connection. After `disconnect` nothing new begins and no
 * load goes on, but slots that the engine may still be copying stay taken until `end`: the session layer decides when
 * that is safe.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { NamespaceState } from './fetches.ts';
import { Load, type LoadEvents } from './load.ts';
import type { StoreParts } from './parts.ts';
import { Prefetch } from './prefetch.ts';
import { SessionPins } from './session-pins.ts';
import { type Reservation, type SessionTraits, SessionWrites } from './session-writes.ts';
import { inOneTurn, type Steps } from './steps.ts';
import type { Ticket } from './tickets.ts';

/** What `prefetch` says: `accepted` is false with the reason why. */
export interface PrefetchAnswer {
  readonly accepted: boolean;
  readonly reason: '' | 'session_limit' | 'budget' | 'closed';
}

export class Holdings {
  readonly state: NamespaceState;
  readonly #parts: StoreParts;
  readonly #traits: SessionTraits;
  readonly #writes: SessionWrites;
  readonly #loads = new Map<bigint, Load>();
  readonly #prefetches = new Map<bigint, Prefetch>();
  readonly #pins: SessionPins;
  /** What its loads wait for. */
  readonly #waits = { awaited: 0 };
  #connected = true;
  #ended = false;

  constructor(parts: StoreParts, state: NamespaceState, traits: SessionTraits) {
    this.#parts = parts;
    this.state = state;
    this.#traits = traits;
    this.#writes = new SessionWrites(parts, state, traits);
    this.#pins = new SessionPins(parts, state);
  }

  /** Slots or leases are out that an engine's copy may be using. */
  get holdsSlots(): boolean {
    return this.#writes.slotCount > 0 || this.#loads.size > 0;
  }

  /** `awaited`: blocks that its loads wait for though they cannot be had yet. */
  get counts(): { readonly reserved: number; readonly loads: number; readonly pins: number; readonly awaited: number } {
    const { awaited } = this.#waits;
    return { reserved: this.#writes.slotCount, loads: this.#loads.size, pins: this.#pins.blockCount, awaited };
  }

  /**
   * Resolves when it is known of which blocks an engine found wrong bytes rightly; undefined: none of these is being looked at. Who
   * reserves before would be told "held" of what is about to leave.
   */
  settled(hashes: readonly HashKey[]): Promise<unknown> | undefined {
    return this.#parts.settled(this.state.namespace, hashes);
  }

  /** The session's connection has not ended: something new may begin. */
  get isConnected(): boolean {
    return this.#connected;
  }

  /** As `SessionWrites.reserve`; `reserve`: all of it in this turn. So are the others below. */
  reserving(parent: HashKey | null, hashes: readonly HashKey[]): Steps<Reservation[]> {
    return this.#writes.reserve(parent, hashes);
  }

  reserve(parent: HashKey | null, hashes: readonly HashKey[]): Reservation[] {
    return inOneTurn(this.reserving(parent, hashes));
  }

  /** As `SessionWrites.commit`. */
  committing(slots: readonly number[], checksums: readonly bigint[]): Steps<number> {
    return this.#writes.commit(slots, checksums);
  }

  commit(slots: readonly number[], checksums: readonly bigint[]): number {
    return inOneTurn(this.committing(slots, checksums));
  }

  /** As `SessionWrites.abort`. */
  aborting(slots: readonly number[]): Steps<number> {
    return this.#writes.abort(slots);
  }

  abort(slots: readonly number[]): number {
    return inOneTurn(this.aborting(slots));
  }

  /**
   * Begin to bring a chain into the arena; what no tier holds yet is awaited for `awaitMs` after each block that came, 0: it ends the
   * load. KvError BUSY beyond the session's loads. `id` is free again after `release`.
   */
  load(id: bigint, hashes: readonly HashKey[], deadlineMs: number, events: LoadEvents, awaitMs = 0): void {
    const { limits, counters } = this.#parts;
    this.#parts.sweep();
    if (this.#loads.has(id))
      throw new KvError('PROTOCOL', `load: id ${id} is leased already; use a new id for each load`);
    if (this.#loads.size >= limits.maxLoads) {
      counters.add('load.refused.session_limit');
      throw new KvError('BUSY', `load: this session holds ${limits.maxLoads} loads; release some first`, {
        retry: true,
      });
    }
    let leased = 0;
    for (const load of this.#loads.values()) leased += load.leasedBlocks;
    const maxBlocks = Math.max(0, Math.floor(limits.maxLeasedBytes / this.state.payloadBytes) - leased);
    const load = new Load(
      this.state,
      hashes,
      {
        ...this.#parts,
        ...{ maxBlocks, tenant: this.#traits.tenant, session: this.#waits },
        onOver: (loaded) => {
          this.#parts.recency.used(this.state.namespace, hashes, loaded);
          this.#parts.pumpWriteDowns();
        },
      },
      events,
    );
    this.#loads.set(id, load);
    counters.add('load.blocks.asked', hashes.length);
    load.start(Math.min(deadlineMs, limits.maxDeadlineMs), Math.min(awaitMs, limits.maxDeadlineMs));
  }

  /** End a load with what is ready; its lease stays. Returns false for one that has ended, or is unknown. */
  endLoad(id: bigint): boolean {
    return this.#loads.get(id)?.endEarly() ?? false;
  }

  /** End a lease; `corrupt` are indexes of its blocks whose bytes were wrong: they are looked at. Returns false for an unknown lease. */
  release(id: bigint, corrupt: readonly number[]): boolean {
    const load = this.#loads.get(id);
    if (load === undefined) return false;
    this.#loads.delete(id);
    const indexes = [...new Set(corrupt)].filter((index) => load.isLeased(index));
    const wrong = [...new Set(indexes.map((index) => load.hashes[index]!))];
    if (wrong.length > 0) this.#parts.suspect(this.state.namespace, wrong);
    load.release();
    return true;
  }

  /**
   * Bring what lower tiers hold of this chain into the arena, behind all loads. Nothing is leased; `cancelPrefetch(id)` ends
   * it early. KvError PROTOCOL when `id` is in use.
   */
  prefetch(id: bigint, hashes: readonly HashKey[]): PrefetchAnswer {
    const { arena, limits, counters, prefetched, pins, blockTurns, fetcher, tenants } = this.#parts;
    const { payloadBytes } = this.state;
    const { tenant } = this.#traits;
    // Room within a quota is the tenant's own: there each block may take the place of another one.
    const isFree = (): boolean =>
      tenants.limitBytes(tenant, 0) === Number.POSITIVE_INFINITY && arena.hasFreeSlot(payloadBytes);
    if (this.#prefetches.has(id)) throw new KvError('PROTOCOL', `prefetch: id ${id} is in use; use a new id for each`);
    counters.add('prefetch.blocks.asked', hashes.length);
    const reason = !this.#connected
      ? 'closed'
      : this.#prefetches.size >= limits.maxPrefetches
        ? 'session_limit'
        : prefetched.hasRoom(payloadBytes, isFree)
          ? ''
          : 'budget';
    if (reason !== '') {
      counters.add(`prefetch.refused.${reason}`, hashes.length);
      return { accepted: false, reason };
    }
    const prefetch = new Prefetch(this.state, hashes, {
      prefetched,
      counters,
      tenant,
      pins,
      blockTurns,
      isFree,
      onEnd: () => this.#prefetches.delete(id),
    });
    this.#prefetches.set(id, prefetch);
    fetcher.add(prefetch);
    return { accepted: true, reason: '' };
  }

  /** Returns how many blocks of it were not asked for yet; 0 for one that has ended. */
  cancelPrefetch(id: bigint): number {
    return this.#prefetches.get(id)?.cancel() ?? 0;
  }

  /** As `SessionPins.pin`. */
  pinning(hashes: readonly HashKey[], ttlMs: number, ticket?: Ticket): Steps<number> {
    return this.#pins.pin(hashes, ttlMs, ticket);
  }

  pin(hashes: readonly HashKey[], ttlMs: number, ticket?: Ticket): number {
    return inOneTurn(this.pinning(hashes, ttlMs, ticket));
  }

  /** As `SessionPins.unpin`. */
  unpinning(hashes: readonly HashKey[]): Steps<number> {
    return this.#pins.unpin(hashes);
  }

  unpin(hashes: readonly HashKey[]): number {
    return inOneTurn(this.unpinning(hashes));
  }

  /** The connection ended: nothing goes on, but slots stay taken (see the head of this file). */
  disconnect(): void {
    if (!this.#connected) return;
    this.#connected = false;
    this.#pins.end();
    for (const load of this.#loads.values()) load.cancel();
    for (const prefetch of [...this.#prefetches.values()]) prefetch.cancel();
    this.#writes.disconnect();
  }

  /** No copy of this session can be under way any more: give everything back. */
  end(): void {
    if (this.#ended) return;
    this.disconnect();
    this.#ended = true;
    this.#writes.end();
    for (const load of this.#loads.values()) load.release();
    this.#loads.clear();
    this.#parts.namespaces.release(this.state);
  }
}

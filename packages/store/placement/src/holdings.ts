/**
 * What one session holds of the store: slots reserved for writing, leases for reading, pins.
 *
 * Life of a slot:   reserve → (engine writes) → commit → visible        or abort → free
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
import type { Ticket } from './tickets.ts';

export type ReserveStatus = 'reserved' | 'held' | 'busy' | 'refused';

export interface Reservation {
  readonly status: ReserveStatus;
  /** Offset of the slot's header; undefined unless 'reserved'. */
  readonly slot: number | undefined;
  /** Why it was refused; '' when it was not. */
  readonly reason: string;
}

/** What `prefetch` says: `accepted` is false with the reason why. */
export interface PrefetchAnswer {
  readonly accepted: boolean;
  readonly reason: '' | 'session_limit' | 'budget' | 'closed';
}

/** What a session is, apart from its namespace. */
export interface SessionTraits {
  readonly blockTokens: number;
  readonly tenant: number;
  /** 0: its blocks do not expire. */
  readonly ttlS: number;
}

interface Reserved {
  readonly hash: HashKey;
  readonly parent: HashKey | null;
  /** Whose room it takes: the block's owner's, where a tier has it, else this session's tenant's. */
  readonly payer: number;
}

export class Holdings {
  readonly state: NamespaceState;
  readonly #parts: StoreParts;
  readonly #traits: SessionTraits;
  readonly #reserved = new Map<number, Reserved>();
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
    this.#pins = new SessionPins(parts, state);
  }

  /** Slots or leases are out that an engine's copy may be using. */
  get holdsSlots(): boolean {
    return this.#reserved.size > 0 || this.#loads.size > 0;
  }

  /** `awaited`: blocks that its loads wait for though they cannot be had yet. */
  get counts(): { readonly reserved: number; readonly loads: number; readonly pins: number; readonly awaited: number } {
    const { awaited } = this.#waits;
    return { reserved: this.#reserved.size, loads: this.#loads.size, pins: this.#pins.blockCount, awaited };
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

  /**
   * Slots for new blocks of one chain; `parent` precedes the first. What follows a refused block is refused too: without
   * its parent it could never be found. Nor is any of the chain evicted for another of it: what it holds is pinned meanwhile.
   */
  reserve(parent: HashKey | null, hashes: readonly HashKey[]): Reservation[] {
    const { arena, pins, limits, counters, failpoint, tenants, ownerOf, removeIfOver } = this.#parts;
    const { namespace, payloadBytes, writing } = this.state;
    this.#parts.sweep();
    for (const hash of hashes) removeIfOver(namespace, hash);
    const kept = this.#keep(parent, hashes);
    const maxReserved = Math.max(1, Math.floor(limits.maxReservedBytes / payloadBytes));
    let refusal = parent !== null && !this.#isKnown(parent) ? 'no_parent' : '';
    let before = parent;
    const out: Reservation[] = [];
    for (const hash of hashes) {
      let status: ReserveStatus = 'refused';
      let slot: number | undefined;
      const payer = ownerOf(namespace, hash) || this.#traits.tenant;
      if (this.#isHeld(hash)) status = 'held';
      else if (writing.has(hash) || pins.isLeaving(namespace, hash)) status = 'busy';
      else if (refusal === '') {
        const stranger = arena.get(namespace, hash) !== undefined;
        if (stranger) refusal = 'other_size';
        else if (this.#reserved.size >= maxReserved) refusal = 'session_limit';
        else {
          if (!tenants.reserve(payer, 0, payloadBytes)) refusal = 'quota';
          else {
            slot = arena.allocate(namespace, payloadBytes);
            if (slot === undefined) {
              refusal = 'no_space';
              tenants.settle(payer, 0, payloadBytes);
            }
          }
        }
      }
      if (slot !== undefined) {
        status = 'reserved';
        writing.add(hash);
        this.#reserved.set(slot, { hash, parent: before, payer });
        failpoint?.('store.reserve.allocated');
      }
      if (status === 'refused') counters.add(`reserve.refused.${refusal}`);
      else counters.add(`reserve.${status}`);
      out.push({ status, slot, reason: status === 'refused' ? refusal : '' });
      before = hash;
    }
    for (const hash of kept) pins.unpin(namespace, hash);
    // What an engine holds itself it never looks up here; that it is still in use shows when it offers it again.
    const held = hashes.filter((_, index) => out[index]!.status === 'held');
    this.#parts.recency.used(namespace, held, held.length);
    for (const hash of held) if (arena.get(namespace, hash) !== undefined) this.#parts.onUsed(this.state, hash, false);
    if (held.length > 0) this.#parts.pumpWriteDowns(); // a tier may want them now, and no commit need follow
    return out;
  }

  /** The bytes are in place: make the blocks visible and send them down. Returns the count. */
  commit(slots: readonly number[], checksums: readonly bigint[]): number {
    const { arena, pins, counters, failpoint, tenants, onCommitted, removeIfOver, wallS } = this.#parts;
    const { namespace, payloadBytes, writing } = this.state;
    const { ttlS, blockTokens: tokenCount } = this.#traits;
    const expiresS = ttlS === 0 ? 0 : wallS() + ttlS;
    for (const slot of slots) this.#mustBeReserved(slot, 'commit');
    failpoint?.('store.commit.before');
    const published: HashKey[] = [];
    for (const [index, slot] of slots.entries()) {
      const { hash, parent, payer } = this.#mustBeReserved(slot, 'commit');
      this.#reserved.delete(slot);
      writing.delete(hash);
      tenants.settle(payer, 0, payloadBytes);
      removeIfOver(namespace, hash);
      if (arena.get(namespace, hash) !== undefined || pins.isLeaving(namespace, hash)) {
        arena.free(slot); // promoted from a lower tier meanwhile, and perhaps found corrupt and still leased
        counters.add('commit.duplicate');
        continue;
      }
      const checksum = checksums[index]!;
      const fields = { hash, parent, tokenCount, payloadBytes, checksum, expiresS };
      tenants.during(payer, () => arena.publish(namespace, fields, slot));
      published.push(hash);
      failpoint?.('store.commit.published');
      onCommitted(this.state, hash);
    }
    counters.add('commit.blocks', published.length);
    this.#parts.pumpWriteDowns();
    return slots.length;
  }

  /** Give reserved slots back unwritten. Returns the count. */
  abort(slots: readonly number[]): number {
    for (const slot of slots) this.#mustBeReserved(slot, 'abort');
    for (const slot of slots) this.#drop(slot);
    this.#parts.counters.add('abort.blocks', slots.length);
    return slots.length;
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
    const { limits, counters, prefetched, pins, fetcher } = this.#parts;
    if (this.#prefetches.has(id)) throw new KvError('PROTOCOL', `prefetch: id ${id} is in use; use a new id for each`);
    counters.add('prefetch.blocks.asked', hashes.length);
    const reason = !this.#connected
      ? 'closed'
      : this.#prefetches.size >= limits.maxPrefetches
        ? 'session_limit'
        : prefetched.hasRoom(this.state.payloadBytes)
          ? ''
          : 'budget';
    if (reason !== '') {
      counters.add(`prefetch.refused.${reason}`, hashes.length);
      return { accepted: false, reason };
    }
    const prefetch = new Prefetch(this.state, hashes, {
      prefetched,
      counters,
      tenant: this.#traits.tenant,
      pins,
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
  pin(hashes: readonly HashKey[], ttlMs: number, ticket?: Ticket): number {
    return this.#pins.pin(hashes, ttlMs, ticket);
  }

  /** Returns how many of `hashes` were pinned by this session. */
  unpin(hashes: readonly HashKey[]): number {
    return this.#pins.unpin(hashes);
  }

  /** The connection ended: nothing goes on, but slots stay taken (see the head of this file). */
  disconnect(): void {
    if (!this.#connected) return;
    this.#connected = false;
    this.#pins.end();
    for (const load of this.#loads.values()) load.cancel();
    for (const prefetch of [...this.#prefetches.values()]) prefetch.cancel();
    // Another engine may write these blocks anew, into other slots: this session can no longer commit them.
    for (const { hash } of this.#reserved.values()) this.state.writing.delete(hash);
  }

  /** No copy of this session can be under way any more: give everything back. */
  end(): void {
    if (this.#ended) return;
    this.disconnect();
    this.#ended = true;
    for (const [slot, { payer }] of this.#reserved) {
      this.#parts.arena.free(slot);
      this.#parts.tenants.settle(payer, 0, this.state.payloadBytes);
    }
    this.#reserved.clear();
    for (const load of this.#loads.values()) load.release();
    this.#loads.clear();
    this.#parts.namespaces.release(this.state);
  }

  /** Pins what the arena holds of a chain. */
  #keep(parent: HashKey | null, hashes: readonly HashKey[]): HashKey[] {
    const { arena, pins } = this.#parts;
    const { namespace } = this.state;
    const chain = parent === null ? hashes : [parent, ...hashes];
    const kept = chain.filter((hash) => arena.get(namespace, hash) !== undefined);
    if (kept.length === chain.length) return []; // nothing will be allocated
    for (const hash of kept) pins.pin(namespace, hash);
    return kept;
  }

  #drop(slot: number): void {
    const { hash, payer } = this.#mustBeReserved(slot, 'abort');
    this.#reserved.delete(slot);
    this.state.writing.delete(hash);
    this.#parts.arena.free(slot);
    this.#parts.tenants.settle(payer, 0, this.state.payloadBytes);
  }

  #mustBeReserved(slot: number, call: string): Reserved {
    const reserved = this.#reserved.get(slot);
    if (reserved !== undefined) return reserved;
    throw new KvError(
      'PROTOCOL',
      `${call}: the slot at ${slot} is not reserved by this session; commit or abort each slot once`,
    );
  }

  #isHeld(hash: HashKey): boolean {
    const { arena, locate, isOver } = this.#parts;
    const block = arena.get(this.state.namespace, hash);
    const inArena = block?.payloadBytes === this.state.payloadBytes && !isOver(block.expiresS);
    return inArena || this.state.fetching.has(hash) || locate(this.state, hash) !== undefined;
  }

  #isKnown(hash: HashKey): boolean {
    return this.state.writing.has(hash) || this.#isHeld(hash);
  }
}

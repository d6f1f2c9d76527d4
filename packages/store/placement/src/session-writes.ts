/**
 * What one session has reserved for writing.
 *
 * Life of a slot:   reserve → (engine writes) → commit → visible        or abort → free
 *
 * Invariants: a block becomes visible only by `commit` of the session that reserved it; a slot is committed or aborted once. A long
 * chain is reserved and committed over several turns (steps.ts): blocks of its beginning can be had before those of its end.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { NamespaceState } from './fetches.ts';
import type { StoreParts } from './parts.ts';
import { isStepEnd, type Steps, stepping } from './steps.ts';

export type ReserveStatus = 'reserved' | 'held' | 'busy' | 'refused';

export interface Reservation {
  readonly status: ReserveStatus;
  /** Offset of the slot's header; undefined unless 'reserved'. */
  readonly slot: number | undefined;
  /** Why it was refused; '' when it was not. */
  readonly reason: string;
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

export class SessionWrites {
  readonly #parts: StoreParts;
  readonly #state: NamespaceState;
  readonly #traits: SessionTraits;
  readonly #reserved = new Map<number, Reserved>();
  readonly #arenaBytes: number;
  #connected = true;

  constructor(parts: StoreParts, state: NamespaceState, traits: SessionTraits) {
    this.#parts = parts;
    this.#state = state;
    this.#traits = traits;
    this.#arenaBytes = parts.arena.stats().capacityBytes;
  }

  get slotCount(): number {
    return this.#reserved.size;
  }

  /**
   * Slots for blocks of one chain that are not here; `parent` precedes the first. What follows a refused block is refused too: without
   * its parent it could never be found. Nor is any of the chain evicted for another of it: what it holds is pinned meanwhile.
   */
  *reserve(parent: HashKey | null, hashes: readonly HashKey[]): Steps<Reservation[]> {
    const kept = new Set<HashKey>();
    this.#parts.sweep();
    try {
      yield* this.#keep(parent, hashes, kept);
      // Nothing is pinned where nothing will be allocated.
      if (parent !== null && kept.size > 0) yield* this.#keepWarm(parent);
      const elsewhere = new Set<number>();
      const out = yield* this.#take(parent, hashes, kept, elsewhere);
      for (const hash of kept) {
        if (kept.size % stepping.blocks === 0) yield;
        this.#letGo(hash, kept);
      }
      yield* this.#used(hashes.filter((_, index) => out[index]?.status === 'held' || elsewhere.has(index)));
      return out;
    } finally {
      for (const hash of kept) this.#letGo(hash, kept);
    }
  }

  /** The bytes are in place: make the blocks visible and send them down. Returns the count. */
  *commit(slots: readonly number[], checksums: readonly bigint[]): Steps<number> {
    const { counters, failpoint, wallS, pumpWriteDowns } = this.#parts;
    const { ttlS } = this.#traits;
    const expiresS = ttlS === 0 ? 0 : wallS() + ttlS;
    for (const slot of slots) this.#mustBeReserved(slot, 'commit');
    failpoint?.('store.commit.before');
    let published = 0;
    try {
      for (const [index, slot] of slots.entries()) {
        if (this.#publish(slot, checksums[index]!, expiresS)) published++;
        if (isStepEnd(index + 1, slots.length)) yield;
        if (!this.#connected) break;
      }
    } finally {
      counters.add('commit.blocks', published);
      pumpWriteDowns();
    }
    return slots.length;
  }

  /** Give reserved slots back unwritten. Returns the count. */
  *abort(slots: readonly number[]): Steps<number> {
    for (const slot of slots) this.#mustBeReserved(slot, 'abort');
    for (const [index, slot] of slots.entries()) {
      this.#drop(slot);
      if (isStepEnd(index + 1, slots.length)) yield;
      if (!this.#connected) break;
    }
    this.#parts.counters.add('abort.blocks', slots.length);
    return slots.length;
  }

  /** Another engine may write these blocks anew, into other slots: this session can no longer commit them. */
  disconnect(): void {
    this.#connected = false;
    for (const { hash } of this.#reserved.values()) this.#state.writing.delete(hash);
  }

  /** No copy into them can be under way any more. */
  end(): void {
    for (const [slot, { payer }] of this.#reserved) {
      this.#parts.arena.free(slot);
      this.#parts.tenants.settle(payer, 0, this.#state.payloadBytes);
    }
    this.#reserved.clear();
  }

  /** Pins what the arena holds of a chain. */
  *#keep(parent: HashKey | null, hashes: readonly HashKey[], kept: Set<HashKey>): Steps<void> {
    const { arena, pins, removeIfOver } = this.#parts;
    const { namespace } = this.#state;
    const keep = (hash: HashKey): void => {
      if (kept.has(hash) || arena.get(namespace, hash) === undefined) return;
      pins.pin(namespace, hash);
      kept.add(hash);
    };
    if (hashes.length <= stepping.blocks) {
      for (const hash of hashes) removeIfOver(namespace, hash);
      const chain = parent === null ? hashes : [parent, ...hashes];
      if (chain.every((hash) => arena.get(namespace, hash) !== undefined)) return; // nothing will be allocated
      for (const hash of chain) keep(hash);
      return;
    }
    if (parent !== null) keep(parent);
    for (const [index, hash] of hashes.entries()) {
      removeIfOver(namespace, hash);
      keep(hash);
      if (isStepEnd(index + 1, hashes.length)) yield;
    }
    yield;
  }

  /** What `#keep` has pinned. */
  #letGo(hash: HashKey, kept: Set<HashKey>): void {
    if (kept.delete(hash)) this.#parts.pins.unpin(this.#state.namespace, hash);
  }

  /**
   * What nobody holds comes first. What others hold has what room is left, and is `held` where there is none: the chain's new end is not
   * refused for its sake, nor what comes behind that with the next calls, as far as half of the room goes (`#leavesHalf`).
   * @param elsewhere gets the indexes of what others hold
   */
  *#take(
    parent: HashKey | null,
    hashes: readonly HashKey[],
    kept: Set<HashKey>,
    elsewhere: Set<number>,
  ): Steps<Reservation[]> {
    let refusal = parent !== null && !this.#isKnown(parent) ? 'no_parent' : '';
    const out: Reservation[] = [];
    for (const [index, hash] of hashes.entries()) {
      if (!this.#connected) break;
      const found = this.#find(hash, kept);
      let taken = without('refused', refusal);
      if (found === 'elsewhere') elsewhere.add(index);
      if (found !== 'nowhere') taken = without(found === 'busy' ? 'busy' : 'held');
      else if (refusal === '') taken = this.#slotFor(hash, index === 0 ? parent : hashes[index - 1]!, true);
      if (taken.status === 'refused') refusal = taken.reason;
      if (found !== 'elsewhere') this.#count(taken);
      out.push(taken);
      if (isStepEnd(out.length, hashes.length)) yield;
    }
    // These are looked at for the second time: with all of them this step may have twice its blocks.
    if (elsewhere.size > 0 && hashes.length + elsewhere.size > stepping.blocks) yield;
    let hasRoom = refusal === '';
    const full = new Set<number>();
    let looked = 0;
    for (const index of elsewhere) {
      hasRoom &&= this.#connected && this.#leavesHalf();
      if (hasRoom) {
        const taken = this.#takeOthers(hashes[index]!, index === 0 ? parent : hashes[index - 1]!, kept, full);
        if (taken.status !== 'refused') out[index] = taken;
        hasRoom = taken.reason !== 'no_space' && taken.reason !== 'session_limit';
      }
      this.#count(out[index]!);
      if (isStepEnd(++looked, elsewhere.size)) yield;
    }
    return out;
  }

  /** @param full gets the tenants whose quota has no room */
  #takeOthers(hash: HashKey, parent: HashKey | null, kept: Set<HashKey>, full: Set<number>): Reservation {
    const { tenants } = this.#parts;
    const found = this.#find(hash, kept);
    if (found === 'busy' || found === 'here') return without(found === 'busy' ? 'busy' : 'held');
    const payer = this.#payerOf(hash);
    if (full.has(payer) || tenants.hasReservedHalf(payer, 0)) return without('held');
    const taken = this.#slotFor(hash, parent, false);
    if (taken.reason === 'quota') full.add(payer);
    return taken;
  }

  /**
   * Whether half of what this session may reserve, and of the arena, is free of what is reserved or pinned: more of a chain may come with
   * the next call, before any of this is committed.
   */
  #leavesHalf(): boolean {
    const { pins, tenants } = this.#parts;
    const tiedBytes = tenants.reservedBytes(0) + pins.bytes;
    return 2 * this.#reserved.size < this.#maxReserved && 2 * tiedBytes < this.#arenaBytes;
  }

  #find(hash: HashKey, kept: Set<HashKey>): 'here' | 'busy' | 'elsewhere' | 'nowhere' {
    const { pins, removeIfOver } = this.#parts;
    const { namespace, writing } = this.#state;
    removeIfOver(namespace, hash); // its time may have come since it was pinned
    if (pins.isLeaving(namespace, hash)) this.#letGo(hash, kept); // nor is this pin to keep its name from being made anew
    const holder = this.#holderOf(hash);
    if (holder === 'here') return holder;
    return writing.has(hash) || pins.isLeaving(namespace, hash) ? 'busy' : (holder ?? 'nowhere');
  }

  get #maxReserved(): number {
    return Math.max(1, Math.floor(this.#parts.limits.maxReservedBytes / this.#state.payloadBytes));
  }

  #payerOf(hash: HashKey): number {
    return this.#parts.ownerOf(this.#state.namespace, hash) || this.#traits.tenant;
  }

  /** For a block that is not here. `isRefusal`: the block is refused where its quota has no room, and that is counted. */
  #slotFor(hash: HashKey, parent: HashKey | null, isRefusal: boolean): Reservation {
    const { arena, failpoint, tenants } = this.#parts;
    const { namespace, payloadBytes, writing } = this.#state;
    const payer = this.#payerOf(hash);
    let slot: number | undefined;
    let refusal = '';
    if (arena.get(namespace, hash) !== undefined) refusal = 'other_size';
    else if (this.#reserved.size >= this.#maxReserved) refusal = 'session_limit';
    else if (!tenants.reserve(payer, 0, payloadBytes, isRefusal)) refusal = 'quota';
    else {
      slot = arena.allocate(namespace, payloadBytes);
      if (slot === undefined) {
        refusal = 'no_space';
        tenants.settle(payer, 0, payloadBytes);
      }
    }
    if (slot === undefined) return without('refused', refusal);
    writing.add(hash);
    this.#reserved.set(slot, { hash, parent, payer });
    failpoint?.('store.reserve.allocated');
    return { status: 'reserved', slot, reason: '' };
  }

  #count({ status, reason }: Reservation): void {
    const { counters } = this.#parts;
    if (status === 'refused') counters.add(`reserve.refused.${reason}`);
    else counters.add(`reserve.${status}`);
  }

  /** What an engine holds itself it never looks up here; that it is still in use shows when it offers it again. */
  *#used(held: readonly HashKey[]): Steps<void> {
    if (held.length === 0) return;
    const { arena, recency, onUsed, pumpWriteDowns } = this.#parts;
    const { namespace } = this.#state;
    recency.used(namespace, held, held.length);
    try {
      for (const [index, hash] of held.entries()) {
        if (arena.get(namespace, hash) !== undefined) onUsed(this.#state, hash, false);
        if (isStepEnd(index + 1, held.length)) yield;
      }
    } finally {
      pumpWriteDowns(); // a tier may want them now, and no commit need follow
    }
  }

  /**
   * A chain that grows is in use, and nobody names its beginning again: an answer that takes longer than the arena takes to turn over would
   * lose what it stands on, and be refused from there on. Told to the arena alone, a few times a turnover: below it nothing is so short;
   * before room is made for what follows, and from the tail on, so that parents end up at least as recent as their children.
   */
  *#keepWarm(parent: HashKey): Steps<void> {
    const { arena, limits, tenants } = this.#parts;
    const { namespace } = this.#state;
    if (!arena.isDue(namespace, parent, tenants.limitBytes(this.#traits.tenant, 0))) return;
    const chain: HashKey[] = [];
    for (let hash: HashKey | null = parent; hash !== null; ) {
      const block = arena.get(namespace, hash);
      // Who gave the parents can have made a circle of them.
      if (block === undefined || chain.length === limits.maxTouchBlocks) break;
      chain.push(hash);
      hash = block.parent;
      if (chain.length % stepping.looked === 0) yield;
    }
    for (let first = 0; first < chain.length; first += limits.touchBatchBlocks) {
      const part = chain.slice(first, first + limits.touchBatchBlocks).reverse();
      if (first > 0) yield;
      arena.refresh(namespace, part);
      tenants.touch(0, namespace, part);
    }
  }

  /** Returns whether the block was not there yet. */
  #publish(slot: number, checksum: bigint, expiresS: number): boolean {
    const { arena, pins, counters, failpoint, tenants, onCommitted, removeIfOver } = this.#parts;
    const { namespace, payloadBytes, writing } = this.#state;
    const { hash, parent, payer } = this.#mustBeReserved(slot, 'commit');
    this.#reserved.delete(slot);
    writing.delete(hash);
    tenants.settle(payer, 0, payloadBytes);
    removeIfOver(namespace, hash);
    if (arena.get(namespace, hash) !== undefined || pins.isLeaving(namespace, hash)) {
      arena.free(slot); // promoted from a lower tier meanwhile, and perhaps found corrupt and still leased
      counters.add('commit.duplicate');
      return false;
    }
    const fields = { hash, parent, tokenCount: this.#traits.blockTokens, payloadBytes, checksum, expiresS };
    tenants.during(payer, () => arena.publish(namespace, fields, slot));
    failpoint?.('store.commit.published');
    onCommitted(this.#state, hash);
    return true;
  }

  #drop(slot: number): void {
    const { hash, payer } = this.#mustBeReserved(slot, 'abort');
    this.#reserved.delete(slot);
    this.#state.writing.delete(hash);
    this.#parts.arena.free(slot);
    this.#parts.tenants.settle(payer, 0, this.#state.payloadBytes);
  }

  #mustBeReserved(slot: number, call: string): Reserved {
    const reserved = this.#reserved.get(slot);
    if (reserved !== undefined) return reserved;
    throw new KvError(
      'PROTOCOL',
      `${call}: the slot at ${slot} is not reserved by this session; commit or abort each slot once`,
    );
  }

  /**
   * What others' memory, Redis or S3 alone hold is elsewhere: the engine has computed it since that was sooner, and would again, each
   * time, were it not kept here now.
   */
  #holderOf(hash: HashKey): 'here' | 'elsewhere' | undefined {
    const { arena, locate, isOver } = this.#parts;
    const block = arena.get(this.#state.namespace, hash);
    const inArena = block?.payloadBytes === this.#state.payloadBytes && !isOver(block.expiresS);
    // What a tier that hangs is to bring, a lookup calls not held: the engine computes it, and that is not to be thrown away.
    const isComing = this.#state.fetching.get(hash)?.gate.available ?? false;
    if (inArena || isComing) return 'here';
    const gate = locate(this.#state, hash);
    return gate && (gate.tier.supports.shared ? 'elsewhere' : 'here');
  }

  #isKnown(hash: HashKey): boolean {
    return this.#state.writing.has(hash) || this.#holderOf(hash) !== undefined;
  }
}

function without(status: Exclude<ReserveStatus, 'reserved'>, reason = ''): Reservation {
  return { status, slot: undefined, reason };
}

/**
 * The pins of one session: blocks of the arena that are not evicted until their time is over, they are unpinned, the session ends, or
 * the ticket they were pinned with is shown.
 *
 *     block ──▶ when each of those who want it does so no more: a ticket, or the session without one
 *     ticket ──▶ its blocks, the end of its time
 *
 * Invariants: a block is pinned once, as long as somebody wants it and the arena lists it; nobody's end is another one's. Pinned bytes
 * and the blocks of all tickets are bounded. Many blocks are pinned over several turns (steps.ts); a ticket may be shown between them.
 * Many blocks are let go over several turns, too (block-turns.ts): until then they are kept from eviction, and nothing else, and whoever
 * pins or unpins in this session lets go of them first.
 */
import type { HashKey } from '@kvtier/identity';
import type { NamespaceState } from './fetches.ts';
import type { StoreParts } from './parts.ts';
import type { Keeper } from './pins.ts';
import { type End, SharedEnds } from './shared-ends.ts';
import { isStepEnd, type Steps, stepping } from './steps.ts';
import type { Ticket, TicketOwner } from './tickets.ts';

/** In place of a ticket: the session wants it without one. */
const untied = '';

interface Ending {
  end: End<HashKey | Kept> | undefined;
}

interface Pin extends Ending {
  /** Who wants the block until when: milliseconds of the clock. Its end is the last of them. */
  readonly wants: Map<Kept | typeof untied, number>;
}

/** What was pinned with a ticket. */
interface Kept extends Ending {
  readonly ticket: Ticket;
  readonly hashes: Set<HashKey>;
  readonly endMs: number;
  /** Of `hashes`, those that count against the bound. */
  blocks: number;
}

export type PinParts = Pick<
  StoreParts,
  'arena' | 'pins' | 'tickets' | 'limits' | 'clock' | 'counters' | 'isOver' | 'blockTurns'
>;

const lastOf = ({ wants }: Pin): number => Math.max(...wants.values());

export class SessionPins implements Keeper, TicketOwner {
  readonly #parts: PinParts;
  readonly #state: NamespaceState;
  readonly #pins = new Map<HashKey, Pin>();
  readonly #tickets = new Map<Ticket, Kept>();
  readonly #ends: SharedEnds<HashKey | Kept>;
  /** What lets go of blocks, and has not ended. */
  readonly #leaving = new Set<Steps<void>>();
  #ticketBlocks = 0;
  #ended = false;

  constructor(parts: PinParts, state: NamespaceState) {
    this.#parts = parts;
    this.#state = state;
    this.#ends = new SharedEnds(parts.clock, (members) => this.#later(this.#over(members)));
  }

  get ended(): boolean {
    return this.#ended;
  }

  get blockCount(): number {
    return this.#pins.size;
  }

  /**
   * Keep blocks of the arena for a time; that of blocks which are kept already begins anew. Returns how many of `hashes` are kept now;
   * all of them when the ticket was shown already. KvError REQUEST when it is another session's.
   */
  *pin(hashes: readonly HashKey[], ttlMs: number, ticket?: Ticket): Steps<number> {
    const { tickets, limits, clock, counters } = this.#parts;
    const { namespace } = this.#state;
    const endMs = Math.ceil(clock.nowUs() / 1000 + Math.min(ttlMs, limits.maxPinTtlMs));
    let tied: Kept | undefined;
    if (ticket !== undefined) {
      if (tickets.wasShown(namespace, ticket)) return hashes.length;
      tied = this.#tie(ticket, endMs);
    }
    yield* this.#finish();
    const kept = tied?.hashes ?? new Set<HashKey>();
    for (let from = 0; from < hashes.length; from += stepping.blocks) {
      if (from > 0) yield;
      if (this.#ended) return 0;
      if (tied !== undefined && this.#tickets.get(ticket!) !== tied) break;
      this.#keep(hashes.slice(from, from + stepping.blocks), endMs, tied, kept);
      if (tied === undefined) continue;
      this.#ticketBlocks += kept.size - tied.blocks;
      tied.blocks = kept.size;
      if (this.#ticketBlocks <= limits.maxTicketBlocks) continue;
      counters.add('pin.refused.tickets');
      yield* this.#untie(tied, endMs);
      tied = undefined;
    }
    if (tied !== undefined) {
      if (tickets.wasShown(namespace, ticket!)) return hashes.length; // while this went on
      if (kept.size === 0 && this.#tickets.get(ticket!) === tied) this.#drop(tied);
    }
    // Some of the first may have left the arena meanwhile.
    return hashes.length > stepping.blocks ? [...kept].filter((hash) => this.#pins.has(hash)).length : kept.size;
  }

  /** Returns how many of `hashes` were pinned by this session. */
  *unpin(hashes: readonly HashKey[]): Steps<number> {
    let count = 0;
    yield* this.#finish();
    for (const [index, hash] of hashes.entries()) {
      if (this.#letGo(hash)) count++;
      if (isStepEnd(index + 1, hashes.length)) yield;
    }
    return count;
  }

  /** They were found wrong, or are over: no time that is left of their pins brings them back. */
  unlisted(hashes: readonly HashKey[]): void {
    for (const hash of hashes) this.#letGo(hash);
  }

  /** Its time is, whether or not its blocks have been let go of. */
  isOver(ticket: Ticket): boolean {
    const kept = this.#tickets.get(ticket);
    return kept === undefined || kept.endMs <= this.#parts.clock.nowUs() / 1000;
  }

  /** Returns how many blocks are let go with that. */
  shown(ticket: Ticket): number {
    const kept = this.#tickets.get(ticket);
    if (kept === undefined) return 0;
    this.#drop(kept);
    const nowMs = this.#parts.clock.nowUs() / 1000;
    let count = 0;
    for (const hash of kept.hashes) if (this.#isLast(hash, kept, nowMs)) count++;
    this.#later(this.#leaveAll(kept));
    return count;
  }

  end(): void {
    this.#ended = true;
    this.#later(this.#over(this.#all()));
  }

  /** Adds those of `hashes` that are kept now to `kept`. */
  #keep(hashes: readonly HashKey[], endMs: number, tied: Kept | undefined, kept: Set<HashKey>): void {
    const { arena, pins, limits, counters, isOver } = this.#parts;
    const { namespace, payloadBytes } = this.#state;
    const maxPins = Math.floor(limits.maxPinnedBytes / payloadBytes);
    for (const hash of hashes) {
      const block = arena.get(namespace, hash);
      if (block?.payloadBytes !== payloadBytes || isOver(block.expiresS)) {
        this.#letGo(hash);
        continue;
      }
      let pin = this.#pins.get(hash);
      if (pin === undefined) {
        if (this.#pins.size >= maxPins) {
          counters.add('pin.refused.session_limit');
          continue;
        }
        pins.pin(namespace, hash);
        if (this.#pins.size === 0) pins.follow(namespace, this);
        pin = { wants: new Map(), end: undefined };
        this.#pins.set(hash, pin);
      }
      pin.wants.set(tied ?? untied, endMs);
      this.#setEnd(hash, pin, lastOf(pin));
      kept.add(hash);
    }
  }

  /** Whether it was pinned. */
  #letGo(hash: HashKey): boolean {
    const { pins } = this.#parts;
    const { namespace } = this.#state;
    const pin = this.#pins.get(hash);
    if (pin === undefined) return false;
    this.#leaveEnd(hash, pin);
    this.#pins.delete(hash);
    pins.unpin(namespace, hash);
    if (this.#pins.size === 0) pins.unfollow(namespace, this);
    return true;
  }

  /** A pin with this ticket begins; what was pinned with it before ends. It may be shown from now on. KvError REQUEST as `pin`. */
  #tie(ticket: Ticket, endMs: number): Kept {
    const { tickets } = this.#parts;
    const { namespace } = this.#state;
    tickets.take(namespace, ticket, this);
    const before = this.#tickets.get(ticket);
    if (before !== undefined) {
      this.#drop(before);
      this.#later(this.#leaveAll(before));
      tickets.take(namespace, ticket, this);
    }
    const tied: Kept = { ticket, hashes: new Set(), end: undefined, endMs, blocks: 0 };
    this.#setEnd(tied, tied, endMs);
    this.#tickets.set(ticket, tied);
    return tied;
  }

  /** There is no room for its ticket: what was pinned with it stays for its time, without one. */
  *#untie(tied: Kept, endMs: number): Steps<void> {
    const { hashes } = tied;
    this.#drop(tied);
    let done = 0;
    for (const hash of hashes) {
      if (this.#pins.has(hash)) {
        this.#keep([hash], endMs, undefined, hashes);
        this.#leave(hash, tied);
      }
      if (isStepEnd(++done, hashes.size)) yield;
      if (this.#ended) return;
    }
  }

  /** The ticket is nobody's any more. */
  #drop(kept: Kept): void {
    this.#parts.tickets.giveUp(this.#state.namespace, kept.ticket, this);
    this.#leaveEnd(kept, kept);
    this.#tickets.delete(kept.ticket);
    this.#ticketBlocks -= kept.blocks;
  }

  #setEnd(member: HashKey | Kept, of: Ending, atMs: number): void {
    if (atMs === of.end?.atMs) return;
    this.#leaveEnd(member, of);
    of.end = this.#ends.join(member, atMs);
  }

  #leaveEnd(member: HashKey | Kept, { end }: Ending): void {
    if (end !== undefined) this.#ends.leave(member, end);
  }

  /** `kept` alone wants the block. What is over, or was dropped, may still be among those who want it. */
  #isLast(hash: HashKey, kept: Kept, nowMs: number): boolean {
    const wants = this.#pins.get(hash)?.wants;
    if (wants === undefined || (wants.get(kept) ?? 0) <= nowMs) return false;
    for (const [who, endMs] of wants) {
      if (who === kept || endMs <= nowMs) continue;
      if (who === untied || this.#tickets.get(who.ticket) === who) return false;
    }
    return true;
  }

  /** One of those who want the block does so no more. */
  #leave(hash: HashKey, who: Kept): void {
    const pin = this.#pins.get(hash);
    if (!pin?.wants.delete(who)) return;
    const lastMs = lastOf(pin);
    if (lastMs <= this.#parts.clock.nowUs() / 1000) this.#letGo(hash);
    else this.#setEnd(hash, pin, lastMs);
  }

  *#leaveAll(kept: Kept): Steps<void> {
    for (const hash of kept.hashes) {
      this.#leave(hash, kept);
      yield;
    }
  }

  /** The time of these is over. */
  *#over(members: Iterable<HashKey | Kept>): Steps<void> {
    for (const member of members) {
      if (typeof member === 'string') this.#letGo(member);
      else {
        this.#drop(member);
        if (!this.#ended) yield* this.#leaveAll(member);
      }
      yield;
    }
  }

  *#all(): Iterable<HashKey | Kept> {
    yield* this.#tickets.values();
    yield* this.#pins.keys();
  }

  #later(leaving: Steps<void>): void {
    this.#leaving.add(leaving);
    this.#parts.blockTurns.add(leaving, () => this.#leaving.delete(leaving));
  }

  /** What nobody wants any more takes no room, and is not pinned by this session. */
  *#finish(): Steps<void> {
    let done = 0;
    for (const leaving of this.#leaving) while (!leaving.next().done) if (++done % stepping.blocks === 0) yield;
  }
}

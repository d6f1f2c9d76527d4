/**
 * The pins of one session: blocks of the arena that are not evicted until their time is over, they are unpinned, the session ends, or
 * the ticket they were pinned with is shown.
 *
 *     block ──▶ when each of those who want it does so no more: a ticket, or the session without one
 *     ticket ──▶ its blocks, the end of its time
 *
 * Invariants: a block is pinned once, as long as somebody wants it and the arena lists it; nobody's end is another one's. Pinned bytes
 * and the blocks of all tickets are bounded. Many blocks are pinned over several turns (steps.ts); a ticket may be shown between them.
 */
import type { HashKey } from '@kvtier/identity';
import type { NamespaceState } from './fetches.ts';
import type { StoreParts } from './parts.ts';
import type { Keeper } from './pins.ts';
import { isStepEnd, type Steps, stepBlocks } from './steps.ts';
import type { Ticket } from './tickets.ts';

/** In place of a ticket: the session wants it without one. */
const untied = '';

interface Pin {
  readonly endsUs: Map<Ticket | typeof untied, number>;
  /** The last of them. */
  endUs: number;
  cancelEnd: () => void;
}

interface Kept {
  readonly hashes: Set<HashKey>;
  readonly cancelEnd: () => void;
  /** Of `hashes`, those that count against the bound. */
  blocks: number;
}

export type PinParts = Pick<StoreParts, 'arena' | 'pins' | 'tickets' | 'limits' | 'clock' | 'counters' | 'isOver'>;

export class SessionPins implements Keeper {
  readonly #parts: PinParts;
  readonly #state: NamespaceState;
  readonly #pins = new Map<HashKey, Pin>();
  readonly #tickets = new Map<Ticket, Kept>();
  #ticketBlocks = 0;
  #ended = false;

  constructor(parts: PinParts, state: NamespaceState) {
    this.#parts = parts;
    this.#state = state;
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
    const lastsMs = Math.min(ttlMs, limits.maxPinTtlMs);
    const endUs = clock.nowUs() + lastsMs * 1000;
    let tied: Kept | undefined;
    if (ticket !== undefined) {
      if (tickets.wasShown(namespace, ticket)) return hashes.length;
      tied = this.#tie(ticket, lastsMs);
    }
    const kept = tied?.hashes ?? new Set<HashKey>();
    for (let from = 0; from < hashes.length; from += stepBlocks) {
      if (from > 0) {
        yield;
        if (this.#ended) return 0;
        if (tied !== undefined && this.#tickets.get(ticket!) !== tied) break;
      }
      this.#keep(hashes.slice(from, from + stepBlocks), endUs, tied && ticket, kept);
      if (tied === undefined) continue;
      this.#ticketBlocks += kept.size - tied.blocks;
      tied.blocks = kept.size;
      if (this.#ticketBlocks <= limits.maxTicketBlocks) continue;
      counters.add('pin.refused.tickets');
      yield* this.#untie(ticket!, tied, endUs);
      tied = undefined;
    }
    if (tied !== undefined) {
      if (tickets.wasShown(namespace, ticket!)) return hashes.length; // while this went on
      if (kept.size === 0) this.#forget(ticket!);
    }
    // Some of the first may have left the arena meanwhile.
    return hashes.length > stepBlocks ? [...kept].filter((hash) => this.#pins.has(hash)).length : kept.size;
  }

  /** Returns how many of `hashes` were pinned by this session. */
  *unpin(hashes: readonly HashKey[]): Steps<number> {
    let count = 0;
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

  shown(ticket: Ticket): number {
    return this.#forget(ticket);
  }

  end(): void {
    this.#ended = true;
    for (const hash of this.#pins.keys()) this.#letGo(hash);
    for (const ticket of [...this.#tickets.keys()]) this.#forget(ticket);
  }

  /** Adds those of `hashes` that are kept now to `kept`. */
  #keep(hashes: readonly HashKey[], endUs: number, ticket: Ticket | undefined, kept: Set<HashKey>): void {
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
        pin = { endsUs: new Map(), endUs: -1, cancelEnd: () => {} };
        this.#pins.set(hash, pin);
      }
      pin.endsUs.set(ticket ?? untied, endUs);
      this.#setEnd(hash, pin);
      kept.add(hash);
    }
  }

  /** Whether it was pinned. */
  #letGo(hash: HashKey): boolean {
    const { pins } = this.#parts;
    const { namespace } = this.#state;
    const pin = this.#pins.get(hash);
    if (pin === undefined) return false;
    pin.cancelEnd();
    this.#pins.delete(hash);
    pins.unpin(namespace, hash);
    if (this.#pins.size === 0) pins.unfollow(namespace, this);
    return true;
  }

  /** A pin with this ticket begins; what was pinned with it before ends. It may be shown from now on. KvError REQUEST as `pin`. */
  #tie(ticket: Ticket, lastsMs: number): Kept {
    const { tickets, clock } = this.#parts;
    const { namespace } = this.#state;
    tickets.take(namespace, ticket, this);
    this.#forget(ticket);
    tickets.take(namespace, ticket, this);
    const cancelEnd = clock.after(lastsMs, () => void this.#forget(ticket));
    const tied: Kept = { hashes: new Set(), cancelEnd, blocks: 0 };
    this.#tickets.set(ticket, tied);
    return tied;
  }

  /** There is no room for its ticket: what was pinned with it stays for its time, without one. */
  *#untie(ticket: Ticket, tied: Kept, endUs: number): Steps<void> {
    const { hashes } = tied;
    this.#drop(ticket, tied);
    let done = 0;
    for (const hash of hashes) {
      if (this.#pins.has(hash)) {
        this.#keep([hash], endUs, undefined, hashes);
        this.#leave(hash, ticket);
      }
      if (isStepEnd(++done, hashes.size)) yield;
      if (this.#ended) return;
    }
  }

  /** The ticket is nobody's any more. */
  #drop(ticket: Ticket, { cancelEnd, blocks }: Kept): void {
    this.#parts.tickets.giveUp(this.#state.namespace, ticket);
    cancelEnd();
    this.#tickets.delete(ticket);
    this.#ticketBlocks -= blocks;
  }

  #setEnd(hash: HashKey, pin: Pin): void {
    const endUs = Math.max(...pin.endsUs.values());
    if (endUs === pin.endUs) return;
    pin.cancelEnd();
    pin.endUs = endUs;
    const { clock } = this.#parts;
    pin.cancelEnd = clock.after((endUs - clock.nowUs()) / 1000, () => void this.#letGo(hash));
  }

  /** One of those who want the block does so no more. Returns whether it is let go with that. */
  #leave(hash: HashKey, who: Ticket | typeof untied): boolean {
    const pin = this.#pins.get(hash);
    if (pin === undefined || !pin.endsUs.delete(who)) return false;
    if (Math.max(...pin.endsUs.values()) <= this.#parts.clock.nowUs()) return this.#letGo(hash);
    this.#setEnd(hash, pin);
    return false;
  }

  /** Returns how many blocks are let go. */
  #forget(ticket: Ticket): number {
    const kept = this.#tickets.get(ticket);
    if (kept === undefined) {
      this.#parts.tickets.giveUp(this.#state.namespace, ticket);
      return 0;
    }
    this.#drop(ticket, kept);
    let count = 0;
    for (const hash of kept.hashes) if (this.#leave(hash, ticket)) count++;
    return count;
  }
}

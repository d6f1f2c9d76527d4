/**
 * The pins of one session: blocks of the arena that are not evicted until their time is over, they are unpinned, the session ends, or
 * the ticket they were pinned with is shown.
 *
 *     block ──▶ when each of those who want it does so no more: a ticket, or the session without one
 *     ticket ──▶ its blocks, the end of its time
 *
 * Invariants: a block is pinned once, as long as somebody wants it; nobody's end is another one's. Pinned bytes and the blocks of all
 * tickets are bounded.
 */
import type { HashKey } from '@kvtier/identity';
import type { NamespaceState } from './fetches.ts';
import type { StoreParts } from './parts.ts';
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
  readonly hashes: readonly HashKey[];
  readonly cancelEnd: () => void;
}

export type PinParts = Pick<StoreParts, 'arena' | 'pins' | 'tickets' | 'limits' | 'clock' | 'counters' | 'isOver'>;

export class SessionPins {
  readonly #parts: PinParts;
  readonly #state: NamespaceState;
  readonly #pins = new Map<HashKey, Pin>();
  readonly #tickets = new Map<Ticket, Kept>();
  #ticketBlocks = 0;

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
  pin(hashes: readonly HashKey[], ttlMs: number, ticket?: Ticket): number {
    const { tickets, limits, clock, counters } = this.#parts;
    const { namespace } = this.#state;
    const lastsMs = Math.min(ttlMs, limits.maxPinTtlMs);
    if (ticket === undefined) return this.#keep(hashes, lastsMs, undefined).length;
    if (tickets.wasShown(namespace, ticket)) return hashes.length;
    tickets.take(namespace, ticket, this);
    this.#forget(ticket);
    const kept = this.#keep(hashes, lastsMs, ticket);
    if (kept.length === 0) return 0;
    if (this.#ticketBlocks + kept.length > limits.maxTicketBlocks) {
      counters.add('pin.refused.tickets');
      this.#keep(kept, lastsMs, undefined);
      for (const hash of kept) this.#leave(hash, ticket);
      return kept.length;
    }
    tickets.take(namespace, ticket, this);
    this.#ticketBlocks += kept.length;
    this.#tickets.set(ticket, { hashes: kept, cancelEnd: clock.after(lastsMs, () => void this.#forget(ticket)) });
    return kept.length;
  }

  /** Returns how many of `hashes` were pinned by this session. */
  unpin(hashes: readonly HashKey[]): number {
    let count = 0;
    for (const hash of hashes) {
      const pin = this.#pins.get(hash);
      if (pin === undefined) continue;
      pin.cancelEnd();
      this.#pins.delete(hash);
      this.#parts.pins.unpin(this.#state.namespace, hash);
      count++;
    }
    return count;
  }

  shown(ticket: Ticket): number {
    return this.#forget(ticket);
  }

  end(): void {
    this.unpin([...this.#pins.keys()]);
    for (const ticket of [...this.#tickets.keys()]) this.#forget(ticket);
  }

  /** Returns those of `hashes` that are kept now. */
  #keep(hashes: readonly HashKey[], lastsMs: number, ticket: Ticket | undefined): HashKey[] {
    const { arena, pins, limits, clock, counters, isOver } = this.#parts;
    const { namespace, payloadBytes } = this.#state;
    const maxPins = Math.floor(limits.maxPinnedBytes / payloadBytes);
    const kept = new Set<HashKey>();
    for (const hash of hashes) {
      const block = arena.get(namespace, hash);
      if (block?.payloadBytes !== payloadBytes || isOver(block.expiresS)) {
        this.unpin([hash]);
        continue;
      }
      let pin = this.#pins.get(hash);
      if (pin === undefined) {
        if (this.#pins.size >= maxPins) {
          counters.add('pin.refused.session_limit');
          continue;
        }
        pins.pin(namespace, hash);
        pin = { endsUs: new Map(), endUs: -1, cancelEnd: () => {} };
        this.#pins.set(hash, pin);
      }
      pin.endsUs.set(ticket ?? untied, clock.nowUs() + lastsMs * 1000);
      this.#setEnd(hash, pin);
      kept.add(hash);
    }
    return [...kept];
  }

  #setEnd(hash: HashKey, pin: Pin): void {
    const endUs = Math.max(...pin.endsUs.values());
    if (endUs === pin.endUs) return;
    pin.cancelEnd();
    pin.endUs = endUs;
    const { clock } = this.#parts;
    pin.cancelEnd = clock.after((endUs - clock.nowUs()) / 1000, () => void this.unpin([hash]));
  }

  /** One of those who want the block does so no more. Returns whether it is let go with that. */
  #leave(hash: HashKey, who: Ticket | typeof untied): boolean {
    const pin = this.#pins.get(hash);
    if (pin === undefined || !pin.endsUs.delete(who)) return false;
    if (Math.max(...pin.endsUs.values()) <= this.#parts.clock.nowUs()) return this.unpin([hash]) === 1;
    this.#setEnd(hash, pin);
    return false;
  }

  /** Returns how many blocks are let go. */
  #forget(ticket: Ticket): number {
    const kept = this.#tickets.get(ticket);
    this.#parts.tickets.giveUp(this.#state.namespace, ticket);
    if (kept === undefined) return 0;
    kept.cancelEnd();
    this.#tickets.delete(ticket);
    this.#ticketBlocks -= kept.hashes.length;
    return kept.hashes.filter((hash) => this.#leave(hash, ticket)).length;
  }
}

/**
 * Tickets of pins: who pins for somebody else hands the ticket on, and whoever shows it in the same namespace ends the pin.
 *
 * Invariants: a ticket is of one session's pins at a time; what was shown is remembered, because the one who was waited for may be
 * faster than the pin: `maxShown` of them, the oldest goes first.
 */
import { KvError } from '@kvtier/errors';
import type { Namespace } from '@kvtier/identity';

/** As many characters as bytes. */
export type Ticket = string & { readonly __brand: 'ticket' };

/** Not to be guessed. */
export const ticketBytes = 16;

/** Of `ticketBytes` bytes. */
export const ticketOf = (bytes: Buffer): Ticket => bytes.toString('latin1') as Ticket;

export interface TicketOwner {
  /** What it has not given up yet is nobody's. */
  readonly ended: boolean;
  /** This one's time is, and what was tied to it is let go of. */
  isOver(ticket: Ticket): boolean;
  /** Returns how many blocks are let go. */
  shown(ticket: Ticket): number;
}

export class Tickets {
  readonly #maxShown: number;
  readonly #owners = new Map<string, TicketOwner>();
  readonly #shown = new Set<string>();

  constructor(maxShown: number) {
    this.#maxShown = maxShown;
  }

  /** Of all sessions, whose pins have not ended. */
  get count(): number {
    return this.#owners.size;
  }

  wasShown({ key }: Namespace, ticket: Ticket): boolean {
    return this.#shown.has(key + ticket);
  }

  /** KvError REQUEST when it is another session's. */
  take({ key }: Namespace, ticket: Ticket, owner: TicketOwner): void {
    const now = this.#owners.get(key + ticket);
    if (now !== undefined && now !== owner && !now.ended && !now.isOver(ticket)) {
      throw new KvError('REQUEST', 'pin: the ticket is another session’s; draw each of them at random');
    }
    this.#owners.set(key + ticket, owner);
  }

  giveUp({ key }: Namespace, ticket: Ticket, owner: TicketOwner): void {
    if (this.#owners.get(key + ticket) === owner) this.#owners.delete(key + ticket);
  }

  /** The pin ends, or will not begin. Returns how many blocks are let go; undefined: there is no such pin. */
  show({ key }: Namespace, ticket: Ticket): number | undefined {
    const owner = this.#owners.get(key + ticket);
    this.#shown.add(key + ticket);
    if (this.#shown.size > this.#maxShown) {
      const [oldest] = this.#shown;
      this.#shown.delete(oldest!);
    }
    return owner === undefined || owner.ended ? undefined : owner.shown(ticket);
  }
}

/** What an engine of a world pins, for itself or for whoever will show the ticket, and lets go. */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { type Holdings, type Ticket, ticketBytes, ticketOf } from '@kvtier/placement';
import type { EngineParts } from './engine-parts.ts';
import type { VirtualSession } from './virtual-session.ts';
import { Violation } from './world.ts';

const maxTickets = 12;

export class EnginePins {
  readonly #parts: EngineParts;
  readonly #holdings: Holdings;
  readonly #session: VirtualSession;

  constructor(parts: EngineParts, holdings: Holdings, session: VirtualSession) {
    this.#parts = parts;
    this.#holdings = holdings;
    this.#session = session;
  }

  pin(hashes: readonly HashKey[]): void {
    const { tickets, tally, report, node } = this.#parts;
    const { world } = node;
    const ttlMs = world.pick([5, 100, 5_000]);
    let ticket: Ticket | undefined;
    if (world.chance(0.4)) {
      const isNew = tickets.length === 0 || world.chance(0.8);
      ticket = isNew
        ? ticketOf(Buffer.from(Array.from({ length: ticketBytes }, () => world.between(0, 255))))
        : world.pick(tickets);
      if (isNew && tickets.push(ticket) > maxTickets) tickets.shift();
    }
    const pinned = (count: number): void => {
      const { pins } = this.#holdings.counts;
      if (count > hashes.length || (ticket === undefined && count > pins))
        throw new Violation(`law 6: ${count} of ${hashes.length} blocks are said to be pinned, and ${pins} are`);
      tally(ticket === undefined ? 'pin' : 'pin.with a ticket', count);
    };
    this.#session.askSteps(
      () => this.#holdings.pinning(hashes, ttlMs, ticket),
      pinned,
      (error) => {
        if (error instanceof KvError && error.code === 'REQUEST') tally('pin.of another');
        else report(error);
      },
    );
  }

  /** One of all engines' tickets, and a chain's first block. */
  showTicket(chain: () => readonly HashKey[]): void {
    const { node, space, tickets, tally } = this.#parts;
    if (tickets.length === 0) return;
    const ticket = node.world.pick(tickets);
    const [hash] = chain();
    this.#session.ask(() => tally('pin.ended', node.store.endPin(space.namespace, ticket, hash!)));
  }

  unpin(hashes: readonly HashKey[]): void {
    this.#session.askSteps(
      () => this.#holdings.unpinning(hashes),
      (count) => this.#parts.tally('unpin', count),
    );
  }
}

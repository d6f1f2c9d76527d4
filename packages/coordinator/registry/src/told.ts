/**
 * The listener's end of every discovery: it hears of members when they differ from what it heard last, of a problem when there was
 * none, and of nothing once the discovery is closed.
 */
import type { Membership } from '@kvtier/config';
import type { Log } from '@kvtier/runtime';
import type { DiscoveryListener } from './discovery.ts';
import { isSameMembership, UniqueMembers } from './unique.ts';

export class Told {
  readonly #listener: DiscoveryListener;
  readonly #unique: UniqueMembers;
  #members: Membership | undefined;
  #why: string | undefined;
  #isClosed = false;

  constructor(listener: DiscoveryListener, log: Log) {
    this.#listener = listener;
    this.#unique = new UniqueMembers(log);
  }

  members(all: Membership): void {
    if (this.#isClosed) return;
    const members = this.#unique.of(all);
    if (this.#members !== undefined && isSameMembership(this.#members, members)) return;
    this.#members = members;
    this.#listener.changed(members);
  }

  problem(why: string | undefined): void {
    if (this.#isClosed || why === this.#why) return;
    this.#why = why;
    this.#listener.problem(why);
  }

  close(): void {
    this.#isClosed = true;
  }
}

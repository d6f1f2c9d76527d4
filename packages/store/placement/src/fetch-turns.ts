/**
 * Whose turn it is to have blocks read, among clients of one priority.
 *
 *     add ──▶ coming ──served──▶ done
 *               ▲         └── the tier that holds its next block reads no more now ──▶ that tier's line ──┐
 *               └──────────────────── a batch was begun ◀── the first in line, when it reads more ◀───────┘
 *
 * Clients take turns, one batch each. Who waits costs nothing when a read ends, but for the first in each line and a few behind it, in
 * rotation: these may have been helped another way (their block was computed, or another tier has it now), or want nothing more.
 *
 * Invariants: nobody has a tier read who stands behind another in its line; a tier that may read is asked to by the first in its line.
 */
import type { FetchClient } from './fetches.ts';
import type { TierGate } from './tier-gate.ts';

/** Of each line when nobody in it can have anything read. */
export const lookedAtInLine = 16;

/** What came of serving a client; a tier: that one reads no more for it now. */
export type Served = 'done' | 'started' | TierGate;

export interface Serving {
  /** @param isFirst whether it may have this tier read, if that has room */
  readonly serve: (client: FetchClient, isFirst: (gate: TierGate) => boolean) => Served;
  /** The turn of the event loop has been long enough. */
  readonly isTurnOver: () => boolean;
}

interface Place {
  readonly client: FetchClient;
  previous: Place | undefined;
  next: Place | undefined;
}

/** Those who wait for one tier. */
class Line {
  #first: Place | undefined;
  #last: Place | undefined;
  /** Whose look it is; undefined: that of the second again. */
  #next: Place | undefined;
  #length = 0;

  get length(): number {
    return this.#length;
  }

  get first(): Place | undefined {
    return this.#first;
  }

  join(client: FetchClient): void {
    const place: Place = { client, previous: this.#last, next: undefined };
    if (this.#last === undefined) this.#first = place;
    else this.#last.next = place;
    this.#last = place;
    this.#length++;
  }

  leave(place: Place): void {
    const { previous, next } = place;
    if (previous === undefined) this.#first = next;
    else previous.next = next;
    if (next === undefined) this.#last = previous;
    else next.previous = previous;
    if (this.#next === place) this.#next = next;
    this.#length--;
  }

  /** Those behind the first, each in its turn, round and round. */
  look(): Place | undefined {
    let place = this.#next ?? this.#first;
    if (place === this.#first) place = place?.next;
    this.#next = place?.next;
    return place;
  }
}

export class FetchTurns {
  /** To be served before anybody in a line is, or to get into one. */
  readonly #coming: FetchClient[] = [];
  readonly #lines = new Map<TierGate, Line>();

  add(client: FetchClient): void {
    this.#coming.push(client);
  }

  /** Until nobody can be served now. */
  serve(serving: Serving): void {
    const full = new Set<TierGate>();
    this.#serveAll(serving, full);
    for (const gate of full) this.#lookBehind(gate, serving);
    this.#serveAll(serving, full); // what that look has set going
  }

  /** `full`: tiers that read no more now; those that are found to be so are added. */
  #serveAll(serving: Serving, full: Set<TierGate>): void {
    while (!serving.isTurnOver()) {
      const client = this.#coming.shift();
      if (client !== undefined) {
        this.#placed(client, this.#served(client, serving));
        continue;
      }
      const gate = this.#nextLine(full);
      if (gate === undefined) return;
      if (!this.#serveAt(gate, this.#lines.get(gate)!.first!, serving)) full.add(gate);
    }
  }

  #lookBehind(gate: TierGate, serving: Serving): void {
    const line = this.#lines.get(gate)!;
    for (let left = Math.min(lookedAtInLine, line.length - 1); left > 0 && !serving.isTurnOver(); left--) {
      const place = line.look();
      if (place !== undefined) this.#serveAt(gate, place, serving);
    }
  }

  /** Returns false when it stays where it is. */
  #serveAt(gate: TierGate, place: Place, serving: Serving): boolean {
    const outcome = this.#served(place.client, serving);
    if (outcome === gate) return false;
    this.#lines.get(gate)!.leave(place);
    this.#placed(place.client, outcome);
    return true;
  }

  #served(client: FetchClient, { serve }: Serving): Served {
    return serve(client, (gate) => (this.#lines.get(gate)?.first?.client ?? client) === client);
  }

  #placed(client: FetchClient, outcome: Served): void {
    if (outcome === 'done') return;
    if (outcome === 'started') this.#coming.push(client);
    else this.#lineOf(outcome).join(client);
  }

  #nextLine(full: ReadonlySet<TierGate>): TierGate | undefined {
    for (const [gate, { first }] of this.#lines) if (first !== undefined && !full.has(gate)) return gate;
    return undefined;
  }

  #lineOf(gate: TierGate): Line {
    let line = this.#lines.get(gate);
    if (line === undefined) {
      line = new Line();
      this.#lines.set(gate, line);
    }
    return line;
  }
}

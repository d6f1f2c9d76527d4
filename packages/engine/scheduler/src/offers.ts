/**
 * What has become of the blocks that a request has offered to the tier, from when it got them until the last offer is answered. Pure.
 *
 * Answers come in any order. What was lost on its way is taken back, with all that was offered behind it, and offered again: each block
 * counts in the last offer that it was in. So an answer counts when nothing before it can be lost any more.
 *
 *     offers   [0,4) [4,8) [8,10)      [4,8) is lost: these end at 4, and [4,10) is offered again
 *                    [4,10)            [0,4) is lost: all end at 0
 *              [0,10)                  and this one counts
 *
 * A node that is silent loses all offers that are on their way: the first of them takes back what lies behind it, the others only what lies
 * before that. So what is counted are rounds, not offers.
 */

/** What was lost of one request is offered again as often as this; of one that has ended after these pauses. */
const pausesMs: readonly number[] = [10, 50, 250];

export interface Offer {
  /** Of the chain, like all blocks here. */
  readonly first: number;
  /** No more than this counts: what was taken back lies behind. */
  end: number;
  /** What was lost had been offered again so often when this was made. */
  readonly round: number;
  /** How many blocks these places of the chain are, in all attention groups. */
  readonly blocksOf: (from: number, to: number) => number;
  /** undefined: not answered yet. */
  answer: Answer | undefined;
}

interface Answer {
  /** Blocks before this one are held. */
  readonly heldEnd: number;
  /** What is not held is left out for good. */
  readonly isDropped: boolean;
}

export interface OfferCounts {
  exported: number;
  skipped: number;
}

export class Offers {
  readonly #counts: OfferCounts;
  /** Those that do not count yet. */
  #open: Offer[] = [];
  #rounds = 0;
  #end = 0;
  #isPutOff: boolean;

  /** `isPutOff`: all that is answered may be taken back still, and nothing counts before `putOffNoMore`. */
  constructor(counts: OfferCounts, isPutOff = false) {
    this.#counts = counts;
    this.#isPutOff = isPutOff;
  }

  /** Blocks before this one have been offered, at some time. */
  get end(): number {
    return this.#end;
  }

  /** Of those, up to here some can be taken back. */
  get openEnd(): number {
    return this.#open.reduce((most, { end }) => Math.max(most, end), 0);
  }

  begin(first: number, end: number, blocksOf: Offer['blocksOf']): Offer {
    const offer: Offer = { first, end, round: this.#rounds, blocksOf, answer: undefined };
    this.#open.push(offer);
    this.#end = Math.max(this.#end, end);
    return offer;
  }

  /** May what is lost of this offer be offered again? */
  mayTakeBack({ round }: Offer): boolean {
    return round < this.#rounds || round < pausesMs.length;
  }

  /** Before that, where no step of the request's comes between. 0: none. */
  pauseMs({ round }: Offer): number {
    return pausesMs[round] ?? 0;
  }

  /** Blocks from `from` on can be offered again up to `most`: up to here, so that of another offer all are, or none. */
  wholeEnd(from: number, most: number): number {
    return this.#open.find(({ first, end }) => from < first && first < most && most < end)?.first ?? most;
  }

  /** It will be, from block `from` on, with all behind it up to block `to`; offers that lie behind that stay as they are. */
  takeBack({ round }: Offer, from: number, to = this.#end): void {
    if (round === this.#rounds) this.#rounds++;
    this.cut(from, to);
  }

  /** Blocks `from`..`to`-1 will be in other offers. What those that have them have behind is given up. */
  cut(from: number, to = this.#end): void {
    for (const offer of this.#open.filter(({ first }) => first < to)) {
      // In a place of its own: it may be offered again when something before it is lost.
      const answer = offer.answer ?? { heldEnd: to, isDropped: true };
      if (offer.end > to) this.#open.push({ ...offer, first: to, answer });
      offer.end = Math.min(offer.end, from);
    }
  }

  answered(offer: Offer, answer: Answer): void {
    offer.answer = answer;
    if (!this.#isPutOff) this.#countDue();
  }

  /** Nothing is taken back any more but by what is lost. */
  putOffNoMore(): void {
    if (!this.#isPutOff) return;
    this.#isPutOff = false;
    this.#countDue();
  }

  #countDue(): void {
    const due = this.#open.filter((one) => one.answer && !this.#open.some(isBefore(one)));
    this.#open = this.#open.filter((one) => !due.includes(one));
    for (const one of due) this.#count(one);
  }

  #count({ first, end, blocksOf, answer }: Offer): void {
    const { heldEnd, isDropped } = answer!;
    this.#counts.exported += blocksOf(first, Math.min(heldEnd, end));
    if (isDropped) this.#counts.skipped += blocksOf(Math.max(first, heldEnd), end);
  }
}

/** It is not answered yet, and what is lost of it would take this one back. */
const isBefore =
  ({ first }: Offer) =>
  (other: Offer): boolean =>
    other.answer === undefined && other.first < first && other.first < other.end;

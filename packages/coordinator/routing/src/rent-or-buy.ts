/**
 * When a prefix should be at one worker more, though for the request at hand it is sooner to wait for a worker that holds it. Where
 * many ask about one document, each for itself waits as long as bringing the document elsewhere takes, and so all wait. How many are
 * still to come nobody knows; that is the question of renting or buying skis (Karlin, Manasse, Rudolph, Sleator 1988):
 *
 *     rent  = what a request waits longer at the holder than it would at a worker without prompts to compute, if that held the prefix
 *     price = what the request is more work there than at the holder: to bring the prefix in, or to compute it
 *
 * Once the rents paid for a prefix reach the price, the request at hand buys: it goes to the worker without work, which holds the prefix
 * from then on. Rents and prices together are at most twice what they would be, were all that comes known. A prefix that one request
 * asks for, or that nobody waits for, is never bought.
 *
 * What is bought must pay within a time, as with a ticket that is valid for one (Fleischer 2001): of rents, half is forgotten after
 *
 *     half-life = 100 × price
 *
 * so that a copy is bought where at least a 140th of the time is waited for its prefix, however large it is. The milliseconds that single
 * requests wait in the course of minutes say nothing of a crowd now: one of them would pay the whole price, for nobody.
 *
 * Bounded: of `maxPrefixes` the rents are remembered; who paid last stays.
 */
import type { Keys } from '@kvtier/kv-index';

const maxPrefixes = 4_096;
/** Times the price: half of what was paid is forgotten after so long. */
const halfLife = 100;

interface Paid {
  readonly seconds: number;
  readonly atMs: number;
}

export class RentOrBuy {
  /** By a word of the hash that names the prefix: two that have it in common share what they pay. */
  readonly #paid = new Map<number, Paid>();

  get prefixes(): number {
    return this.#paid.size;
  }

  /** A request waits for a holder of its first `blocks` blocks. True: it buys instead. */
  pays(keys: Keys, blocks: number, rentS: number, priceS: number, nowMs: number): boolean {
    const prefix = keys[2 * blocks - 2];
    if (prefix === undefined) return false;
    const paidS = leftOf(this.#paid.get(prefix), priceS, nowMs) + rentS;
    const buys = paidS >= priceS;
    this.#paid.delete(prefix);
    this.#paid.set(prefix, { seconds: buys ? paidS - priceS : paidS, atMs: nowMs });
    if (this.#paid.size > maxPrefixes) this.#paid.delete(this.#paid.keys().next().value!);
    return buys;
  }
}

function leftOf(paid: Paid | undefined, priceS: number, nowMs: number): number {
  if (paid === undefined || priceS <= 0) return 0;
  return paid.seconds * 2 ** ((paid.atMs - nowMs) / 1000 / (halfLife * priceS));
}

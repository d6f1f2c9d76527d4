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
 * Bounded: of `maxPrefixes` the rents are remembered; who paid last stays.
 */
import type { Keys } from '@kvtier/kv-index';

const maxPrefixes = 4_096;

export class RentOrBuy {
  /** Seconds, by a word of the hash that names the prefix: two that have it in common share what they pay. */
  readonly #paidS = new Map<number, number>();

  get prefixes(): number {
    return this.#paidS.size;
  }

  /** A request waits for a holder of its first `blocks` blocks. True: it buys instead. */
  pays(keys: Keys, blocks: number, rentS: number, priceS: number): boolean {
    const prefix = keys[2 * blocks - 2];
    if (prefix === undefined) return false;
    const paidS = (this.#paidS.get(prefix) ?? 0) + rentS;
    const buys = paidS >= priceS;
    this.#paidS.delete(prefix);
    this.#paidS.set(prefix, buys ? paidS - priceS : paidS);
    if (this.#paidS.size > maxPrefixes) this.#paidS.delete(this.#paidS.keys().next().value!);
    return buys;
  }
}

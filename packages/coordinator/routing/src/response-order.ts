/**
 * In which order those that wait are looked at: the largest waited ÷ needs^power first (response ratio: Brinch Hansen 1971, whose power
 * is 1). The larger the power, the more short ones are preferred; at 0 who came first is first. What that is worth follows from the load:
 *
 *     power = 0.4, where nothing of prompts is held, or places are short … 1.3, where 0.3 of them or more is held
 *
 * Where nothing is held, what some gain by passing, others lose, and more of them than the tenth that a ninetieth percentile leaves out.
 * Where much is held, most take a hundredth of what the few others do, and each of those few would keep a hundred waiting, some of which
 * lose what is held of them meanwhile. Where places are short, it is answers that take long, and of these nobody knows how long each
 * will be.
 */
import { LastMean } from './last-mean.ts';
import { isFull } from './policies/predicted.ts';
import type { WorkerState } from './policy.ts';

const [leastPower, mostPower] = [0.4, 1.3];
/** While too little is known. */
const usualPower = 1;
/** Between these shares of prompts that are held. */
const [little, much] = [0.05, 0.3];
/** Steps of the power: it changes seldom, and with it what is kept of each request. */
const powerStep = 0.1;

/** A request in the order. */
export interface Ordered {
  readonly sinceMs: number;
  /** At least 1. */
  readonly needsMs: number;
  /** needs^power, of the power that it was reckoned with. */
  price?: number;
  pricePower?: number;
}

export class ResponseOrder {
  readonly #shares = new LastMean();
  #areShort = false;

  /** A request was given to a worker that holds so much of its prompt: 0 to 1. */
  given(share: number): void {
    this.#shares.add(share);
  }

  /** As the workers were seen last. */
  sees(workers: readonly (WorkerState | undefined)[]): void {
    let count = 0;
    let full = 0;
    for (const worker of workers) {
      if (worker === undefined) continue;
      count++;
      if (isFull(worker)) full++;
    }
    this.#areShort = count > 0 && 2 * full >= count;
  }

  get power(): number {
    const power = this.#areShort ? leastPower : this.#powerOfHeld;
    return Math.round(power / powerStep) * powerStep;
  }

  get #powerOfHeld(): number {
    const share = this.#shares.mean;
    if (share === undefined) return usualPower;
    const part = Math.min(Math.max((share - little) / (much - little), 0), 1);
    return leastPower + (mostPower - leastPower) * part;
  }

  /** Of a request, with this power. */
  ratio(one: Ordered, nowMs: number, power: number): number {
    if (one.pricePower !== power) {
      one.price = one.needsMs ** power;
      one.pricePower = power;
    }
    return (nowMs - one.sinceMs) / one.price!;
  }
}

/**
 * Whom one pass over the queue looks up, of those that it may only pass over. The executor stands still meanwhile, and a look takes the
 * longer the more of a prompt is cached: all of a long queue in each pass would take longer than a step.
 *
 * Who waits until fewer load is not looked at again while as many do, but for a few in each pass, in turn: what they want to load,
 * somebody else may have computed or loaded. Of the others a pass ends when so many had to be passed over; those were there first.
 */
import type { EngineRequest } from './request.ts';

/** A look at a prompt of 100,000 tokens takes a third of a millisecond. */
const mostPassedOver = 32;
const mostAgain = 16;

export class Looks {
  #left = 0;
  #againLeft = 0;
  /** Arrival of who was looked at again last; the next turn begins behind it. */
  #turn = -1;

  begin(): void {
    this.#left = mostPassedOver;
    this.#againLeft = mostAgain;
  }

  /** Whether one that waits until fewer load is looked at all the same. */
  again(request: EngineRequest): boolean {
    if (this.#againLeft === 0 || request.arrival <= this.#turn) return false;
    this.#againLeft--;
    this.#turn = request.arrival;
    return true;
  }

  /** One was looked at and is passed over. False: the pass is to end. */
  goOn(): boolean {
    return --this.#left > 0;
  }

  /**
   * The pass has seen those before `at`; undefined: the whole queue. A new turn begins when everybody behind the last one whom the pass came
   * by was looked at. A pass that came less far says nothing of them: one that finds no free place in the step ends at the first.
   */
  end(at: EngineRequest | undefined): void {
    if (this.#againLeft > 0 && (at === undefined || at.arrival > this.#turn)) this.#turn = -1;
  }
}

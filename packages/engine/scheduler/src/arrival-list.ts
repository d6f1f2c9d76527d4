/** Requests in order of arrival: first come, first served, and a preempted one is back at its old place. */
import { invariant } from '@kvtier/errors';
import type { EngineRequest } from './request.ts';

export class ArrivalList {
  readonly #requests: EngineRequest[] = [];
  #handOffs = 0;

  get count(): number {
    return this.#requests.length;
  }

  /** Of these, whose prompts other workers compute. */
  get handOffs(): number {
    return this.#handOffs;
  }

  add(request: EngineRequest): void {
    this.#requests.splice(this.#placeOf(request.arrival), 0, request);
    if (request.handOff) this.#handOffs++;
  }

  remove(request: EngineRequest): void {
    const at = this.#placeOf(request.arrival);
    invariant(this.#requests[at] === request, () => `request ${request.id} is not in the list`);
    this.#requests.splice(at, 1);
    if (request.handOff) this.#handOffs--;
  }

  /** The first one that arrived after this one, or at all: a walk during which any may leave, without a copy. */
  after(request?: EngineRequest): EngineRequest | undefined {
    return this.#requests[request === undefined ? 0 : this.#placeOf(request.arrival + 1)];
  }

  /** The same of the first `most`; undefined: none of them. */
  afterAmong(most: number, arrival: number): EngineRequest | undefined {
    const place = this.#placeOf(arrival + 1);
    return place < most ? this.#requests[place] : undefined;
  }

  /** A copy, so that the list may change while it is walked. */
  toArray(): EngineRequest[] {
    return [...this.#requests];
  }

  [Symbol.iterator](): Iterator<EngineRequest> {
    return this.#requests[Symbol.iterator]();
  }

  /** Index of the first request that did not arrive before `arrival`. */
  #placeOf(arrival: number): number {
    let low = 0;
    let high = this.#requests.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#requests[middle]!.arrival < arrival) low = middle + 1;
      else high = middle;
    }
    return low;
  }
}

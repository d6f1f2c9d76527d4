/**
 * Prompts that were computed for other workers, between their last step and their end: what is left of them is offered to the
 * tier as far as exports have room, their blocks go when all are offered, and they end when the tier has answered for each.
 */
import type { Connector } from './connector.ts';
import type { Exports } from './exports.ts';
import type { EngineRequest } from './request.ts';

export interface StoringOptions {
  readonly connector: Connector;
  readonly exports: Exports;
  /** The request lets its blocks go. */
  readonly release: (request: EngineRequest) => void;
  /** A request may end now. */
  readonly wake: () => void;
  readonly onReady: (request: EngineRequest, readyBlocks: number) => void;
  /** undefined: the tier is gone. */
  readonly onPrefilled: (request: EngineRequest, readyBlocks: number | undefined) => void;
}

export class Storing {
  readonly #options: StoringOptions;
  readonly #requests = new Set<EngineRequest>();

  constructor(options: StoringOptions) {
    this.#options = options;
  }

  /** All of it is computed. */
  add(request: EngineRequest): void {
    this.#requests.add(request);
  }

  delete(request: EngineRequest): void {
    this.#requests.delete(request);
  }

  /** The tier holds blocks `first`..`end`-1 of what one of them, or one that is computed still, has offered. */
  settled(request: EngineRequest, first: number, end: number): void {
    if (request.state === 'finished') return;
    const prefillOnly = request.prefillOnly!;
    if (prefillOnly.held(first, end)) this.#options.onReady(request, prefillOnly.readyBlocks);
    if (this.#requests.has(request)) this.#options.wake();
  }

  /** Between two steps. */
  goOn(): void {
    for (const request of this.#requests) this.#goOn(request);
  }

  #goOn(request: EngineRequest): void {
    const { connector, exports, release, onPrefilled } = this.#options;
    const prefillOnly = request.prefillOnly!;
    if (request.holdsBlocks) {
      exports.offer(request);
      const isOffered = request.offeredBlocks >= prefillOnly.blocks;
      // Nothing will come back to exports, and still there is no room: there never will be.
      const isStuck = !isOffered && exports.heldBlocks === 0;
      if (isOffered || isStuck || !connector.attached) release(request);
    }
    if (request.holdsBlocks || prefillOnly.unsettled > 0) return;
    onPrefilled(request, connector.attached ? prefillOnly.readyBlocks : undefined);
  }
}

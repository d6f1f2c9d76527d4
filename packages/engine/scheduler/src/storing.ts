/**
 * Prompts that were computed for other workers, between their last step and their end: what is left of them is offered to the
 * tier as far as exports have room, and they end when the tier has answered for each. What somebody else is just writing (another
 * request with the same prompt, another engine of that node) is offered again: it is held a few milliseconds later. So is all of it
 * where the cache node has started anew: it may have lost what it held, and takes nothing whose parent it has not.
 */
import type { Connector } from './connector.ts';
import type { Exports } from './exports.ts';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';

/** Before what was busy is offered again; as often as there are pauses, at the end of the prompt. */
const pausesMs: readonly number[] = [5, 10, 20, 40, 80, 160];
/** Nor later than this after the first of them began: a node that is slow is given a second for each offer. */
const mostAgainMs = 1_000;

export interface StoringOptions {
  readonly connector: Connector;
  readonly exports: Exports;
  readonly clock: Clock;
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

  get count(): number {
    return this.#requests.size;
  }

  /** Some hold blocks that come back by themselves: when the tier has answered, or has been asked often enough. */
  get holdsRoom(): boolean {
    for (const { holdsBlocks } of this.#requests) if (holdsBlocks) return true;
    return false;
  }

  /** All of it is computed. */
  add(request: EngineRequest): void {
    this.#requests.add(request);
  }

  delete(request: EngineRequest): void {
    this.#requests.delete(request);
  }

  /** The tier holds blocks `first`..`end`-1 of what one of them, or one that is computed still, has offered; see `OnSettled`. */
  settled(request: EngineRequest, first: number, end: number, isBusy: boolean, epoch: bigint | undefined): void {
    if (request.state === 'finished') return;
    const prefillOnly = request.prefillOnly!;
    this.#checkNode(request);
    if (epoch === prefillOnly.epoch && prefillOnly.held(first, end))
      this.#options.onReady(request, prefillOnly.readyBlocks);
    prefillOnly.isBusy ||= isBusy;
    if (prefillOnly.unsettled === 0 && prefillOnly.isBusy) this.#again(request);
    // Not behind the step that runs. Whoever calls may be at work with it.
    if (this.#requests.has(request)) queueMicrotask(() => this.#ended(request));
  }

  #ended(request: EngineRequest): void {
    if (!this.#requests.has(request)) return;
    this.#goOn(request);
    this.#options.wake();
  }

  /** Somebody needs room: who only waits for answers lets its blocks go, and offers nothing again. False: nobody had any. */
  giveRoom(): boolean {
    let given = false;
    for (const request of this.#requests) {
      if (!request.holdsBlocks || request.offeredBlocks < request.prefillOnly!.blocks) continue;
      this.#options.release(request);
      given = true;
    }
    return given;
  }

  /** Between two steps. */
  goOn(): void {
    for (const request of this.#requests) this.#goOn(request);
  }

  /** What somebody else was writing is offered again, with all behind it: with the next chunk, or after a pause. */
  #again(request: EngineRequest): void {
    const prefillOnly = request.prefillOnly!;
    prefillOnly.isBusy = false;
    const { exports, clock, wake } = this.#options;
    const nowUs = clock.nowUs();
    const pauseMs = pausesMs[prefillOnly.pauses] ?? Number.POSITIVE_INFINITY;
    const isLate = (nowUs - (prefillOnly.pausedUs ?? nowUs)) / 1_000 + pauseMs > mostAgainMs;
    if (prefillOnly.readyBlocks >= prefillOnly.blocks || isLate || !request.holdsBlocks) return;
    exports.takeBack(request, prefillOnly.readyBlocks);
    if (!this.#requests.has(request)) return;
    prefillOnly.pausedUs ??= nowUs;
    prefillOnly.pauses++;
    prefillOnly.isPaused = true;
    clock.after(pauseMs, () => {
      prefillOnly.isPaused = false;
      wake();
    });
  }

  /** Is it the one that all was offered to? Its blocks may have been let go: then nothing can be offered again. */
  #checkNode(request: EngineRequest): void {
    const { connector, exports } = this.#options;
    const { epoch } = connector;
    const prefillOnly = request.prefillOnly!;
    if (epoch === undefined || prefillOnly.epoch === undefined || epoch === prefillOnly.epoch) return;
    prefillOnly.startOver(epoch);
    if (request.holdsBlocks) exports.takeBack(request, 0);
  }

  #goOn(request: EngineRequest): void {
    const { connector, exports, release, onPrefilled } = this.#options;
    const prefillOnly = request.prefillOnly!;
    if (prefillOnly.isPaused) return;
    this.#checkNode(request);
    exports.offer(request);
    if (prefillOnly.unsettled > 0) return;
    // Nothing will come back to exports or the connector, and still there is no room: there never will be.
    const isStuck = exports.heldBlocks === 0 && connector.storingBlocks === 0;
    const isLeft = request.holdsBlocks && request.offeredBlocks < prefillOnly.blocks;
    if (isLeft && !isStuck && connector.attached) return;
    if (request.holdsBlocks) release(request);
    onPrefilled(request, connector.attached ? prefillOnly.readyBlocks : undefined);
  }
}

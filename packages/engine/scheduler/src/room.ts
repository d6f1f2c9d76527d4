/**
 * KV blocks among the requests: who holds some, who gives its own up first, and what is promised already.
 *
 * Invariant: the oldest request that holds blocks never gives them up for a younger one, so something always advances.
 */
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { ArrivalList } from './arrival-list.ts';
import type { Exports } from './exports.ts';
import type { Loads } from './loads.ts';
import type { EngineRequest } from './request.ts';

export interface RoomOptions {
  readonly kv: PrefixCache;
  readonly waiting: ArrivalList;
  readonly running: ArrivalList;
  readonly exports: Exports;
  readonly loads: () => Loads;
}

export class Room {
  readonly #options: RoomOptions;

  constructor(options: RoomOptions) {
    this.#options = options;
  }

  /** Who arrived last of those that hold blocks and can give them up at once, other than `except`. */
  latestHolder(except?: EngineRequest): EngineRequest | undefined {
    let latest: EngineRequest | undefined;
    const consider = (request: EngineRequest): void => {
      if (request.holdsBlocks && request !== except && request.arrival > (latest?.arrival ?? -1)) latest = request;
    };
    for (const request of this.#options.running) consider(request);
    for (const request of this.#options.waiting) consider(request);
    return latest;
  }

  /** Who waits for another worker and arrived after this one gives up its room. False: nobody. */
  revokeYounger(than: EngineRequest): boolean {
    const loads = this.#options.loads();
    const youngest = loads.latestAwaiting();
    if (!youngest || youngest.arrival <= than.arrival) return false;
    if (youngest.handOff!.isRevoked) return true;
    youngest.handOff!.isRevoked = true;
    loads.awaitOnly(youngest, 0);
    return true;
  }

  /** Its blocks can be hit until they are reused. */
  release(request: EngineRequest): void {
    if (!request.suspects) this.#options.exports.giveUp(request);
    this.#options.kv.free(request.id);
    request.holdsBlocks = false;
    request.computedTokens = 0;
    request.offeredBlocks = 0;
  }

  /** Blocks that requests which hold some already still need to finish their prefill. */
  promisedBlocks(): number {
    const { kv, running, waiting, loads } = this.#options;
    let blocks = 0;
    const promise = (request: EngineRequest): void => {
      if (request.holdsBlocks) blocks += kv.blocksToFinish(request);
    };
    for (const request of running) promise(request);
    for (const request of waiting) promise(request);
    for (const request of loads().requests()) promise(request);
    return blocks;
  }
}

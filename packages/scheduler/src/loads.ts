/**
 * Blocks on their way in from the tier. From `start` until the connector calls back, the blocks belong to the connector:
 * whatever happens to the request meanwhile, they are freed only then.
 *
 * Invariant: every load ends its request's wait exactly once, by the callback, by the end of the request, or by a
 * deadline behind the connector's own ("never in the way"): then the request leaves its table behind and starts anew.
 */
import type { Connector, LoadResult } from '@kvtier/connector';
import { invariant } from '@kvtier/errors';
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';

export interface LoadEnd extends LoadResult {
  /** Blocks that the load set out to bring. */
  readonly wanted: number;
  /** First of them in the chain. */
  readonly firstBlock: number;
}

interface Load {
  /** Gone when the request has ended or has given up on the load. */
  request: EngineRequest | undefined;
  readonly cancelDeadline: () => void;
}

export interface LoadsOptions {
  readonly kv: PrefixCache;
  readonly connector: Connector;
  readonly clock: Clock;
  readonly deadlineMs: number;
  /** The request's wait is over. `end` undefined: given up; the request holds nothing any more. */
  readonly onEnd: (request: EngineRequest, end: LoadEnd | undefined) => void;
  /** Blocks that a load held for nobody are free now. */
  readonly onFreed: () => void;
}

export class Loads {
  readonly #options: LoadsOptions;
  /** By table id in the pool. */
  readonly #loads = new Map<string, Load>();
  /** Names tables that were left behind; see `#expire`. */
  #expiredCount = 0;

  constructor(options: LoadsOptions) {
    this.#options = options;
  }

  /** Loads that the connector has not ended, those without a request included. */
  get count(): number {
    return this.#loads.size;
  }

  /** Loads given up at the deadline. */
  get expiredCount(): number {
    return this.#expiredCount;
  }

  /** Requests that wait for a load. */
  *requests(): Generator<EngineRequest> {
    for (const { request } of this.#loads.values()) if (request) yield request;
  }

  /** Load `count` blocks, from `firstBlock` of the chain on, into the request's tables: what these have room for. */
  start(request: EngineRequest, firstBlock: number, count: number): void {
    const { kv, connector, clock, deadlineMs } = this.#options;
    const { id } = request;
    const tables = kv.blockTables(id).map((table) => table.slice(firstBlock, firstBlock + count));
    const blockIds = Int32Array.from(tables.flat());
    invariant(
      tables.every((table) => table.length === count),
      () => `request ${id}: ${count} blocks to load in a table that ends earlier`,
    );
    const cancelDeadline = clock.after(deadlineMs, () => this.#expire(id));
    this.#loads.set(id, { request, cancelDeadline });
    connector.load(id, request.hashes.packed, firstBlock, blockIds, (result) => {
      const loaded = Math.min(Math.max(result.loaded, 0), count);
      this.#end(id, { ...result, loaded, wanted: count, firstBlock });
    });
  }

  /** The request has ended; its blocks are freed when the connector is done with them. */
  abandon(request: EngineRequest): void {
    const load = this.#loads.get(request.id);
    invariant(load?.request === request, () => `request ${request.id}: has no load`);
    load.request = undefined;
    load.cancelDeadline();
  }

  #end(id: string, end: LoadEnd): void {
    const load = this.#loads.get(id);
    invariant(load, () => `request ${id}: the connector ended its load twice`);
    this.#loads.delete(id);
    load.cancelDeadline();
    if (load.request) {
      this.#options.onEnd(load.request, end);
      return;
    }
    this.#options.kv.free(id);
    this.#options.onFreed();
  }

  #expire(id: string): void {
    const load = this.#loads.get(id);
    const request = load?.request;
    if (!load || !request) return;
    load.request = undefined;
    this.#expiredCount++;
    this.#options.connector.forget(id);
    request.id = `${id}+${this.#expiredCount}`; // the old table stays with the load
    this.#options.onEnd(request, undefined);
  }
}

/**
 * Blocks on their way in from the tier. From `start` until the connector calls back, the blocks belong to the connector:
 * whatever happens to the request meanwhile, they are freed only then.
 *
 * Invariant: every load ends its request's wait exactly once, by the callback, by the end of the request, or by a
 * deadline behind the connector's own ("never in the way"): then the request leaves its table behind and starts anew.
 */

import { invariant } from '@kvtier/errors';
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { ArrivedLoad, AwaitedLoad, Connector, LoadResult } from './connector.ts';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';

/** An awaited load that has not ended so long after its own deadline is given up. */
const awaitedGraceMs = 2_000;

export interface LoadEnd extends LoadResult {
  /** Blocks that the load set out to bring. */
  readonly wanted: number;
  /** First of them in the chain. */
  readonly firstBlock: number;
  /** Before the request's first step. */
  readonly first: boolean;
}

interface Load {
  /** Gone when the request has ended or has given up on the load. */
  request: EngineRequest | undefined;
  readonly cancelDeadline: () => void;
  /** Of the chain: the first one, and the one behind the load. */
  readonly firstBlock: number;
  readonly endBlock: number;
  /** It lies in the arena, and the next step may import it. */
  arrived?: ArrivedLoad | undefined;
  /** Of blocks that another worker computes. */
  readonly isAwaited: boolean;
}

/** A request whose load waits for the next step. */
export interface Arrival {
  readonly request: EngineRequest;
  /** Blocks of the chain that the request has, once the load is imported. */
  readonly endBlock: number;
  readonly load: ArrivedLoad;
}

export interface LoadsOptions {
  readonly kv: PrefixCache;
  readonly connector: Connector;
  readonly clock: Clock;
  readonly deadlineMs: number;
  /** The request's wait is over. `end` undefined: given up; the request holds nothing any more. */
  readonly onEnd: (request: EngineRequest, end: LoadEnd | undefined) => void;
  /** All of a load lies in the arena. True: the next step will import it, or say no (`decline`). */
  readonly onArrived?: (() => boolean) | undefined;
  /** Blocks that a load held for nobody are free now. */
  readonly onFreed: () => void;
}

export class Loads {
  readonly #options: LoadsOptions;
  /** By table id in the pool. */
  readonly #loads = new Map<string, Load>();
  #blocks = 0;
  #awaitedCount = 0;
  /** Names tables that were left behind; see `#expire`. */
  #expiredCount = 0;

  constructor(options: LoadsOptions) {
    this.#options = options;
  }

  /** Loads that the connector has not ended, those without a request included. */
  get count(): number {
    return this.#loads.size;
  }

  /** Of these, those that wait for another worker. */
  get awaitedCount(): number {
    return this.#awaitedCount;
  }

  /** Blocks of the others. */
  get blocks(): number {
    return this.#blocks;
  }

  /** Loads given up at the deadline. */
  get expiredCount(): number {
    return this.#expiredCount;
  }

  /** Requests that wait for a load. */
  *requests(): Generator<EngineRequest> {
    for (const { request } of this.#loads.values()) if (request) yield request;
  }

  /** Who arrived last of those that wait for another worker. */
  latestAwaiting(): EngineRequest | undefined {
    let latest: EngineRequest | undefined;
    if (this.#awaitedCount === 0) return latest;
    for (const { request, isAwaited } of this.#loads.values())
      if (request && isAwaited && request.arrival > (latest?.arrival ?? -1)) latest = request;
    return latest;
  }

  /**
   * Load `count` blocks, from `firstBlock` of the chain on, into the request's tables: what these have room for. `awaited`:
   * another worker computes them.
   */
  start(request: EngineRequest, firstBlock: number, count: number, awaited?: AwaitedLoad): void {
    const { kv, connector, clock } = this.#options;
    const deadlineMs = awaited ? awaited.deadlineMs + awaitedGraceMs : this.#options.deadlineMs;
    const { id } = request;
    const tables = kv.blockTables(id);
    const blockIds = new Int32Array(tables.length * count);
    for (let group = 0; group < tables.length; group++) {
      const table = tables[group]!;
      const isLongEnough = table.length >= firstBlock + count;
      invariant(isLongEnough, () => `request ${id}: ${count} blocks to load in a table that ends earlier`);
      for (let i = 0; i < count; i++) blockIds[group * count + i] = table[firstBlock + i]!;
    }
    const cancelDeadline = clock.after(deadlineMs, () => this.#expire(id));
    const endBlock = firstBlock + count;
    const load: Load = { request, cancelDeadline, firstBlock, endBlock, isAwaited: awaited !== undefined };
    this.#loads.set(id, load);
    if (awaited) this.#awaitedCount++;
    else this.#blocks += count;
    const first = request.startedUs === undefined;
    const onDone = (result: LoadResult): void => {
      const loaded = Math.min(Math.max(result.loaded, 0), count);
      this.#end(id, load, { ...result, loaded, wanted: count, firstBlock, first });
    };
    const onArrived = awaited || request.head ? undefined : this.#options.onArrived;
    const offer = (arrived: ArrivedLoad): boolean => {
      if (!load.request || !onArrived?.()) return false;
      load.arrived = arrived;
      return true;
    };
    const { head } = request;
    const hasHead = head && ((): boolean => request.head === head && request.computedTokens < head.endTokens);
    connector.load(id, request.hashes.packed, firstBlock, blockIds, onDone, onArrived && offer, awaited, hasHead);
  }

  /** A request that waits for another worker: until the chain's first `endBlock` blocks are there, and no longer. */
  awaitOnly(request: EngineRequest, endBlock: number): void {
    const { firstBlock } = this.#of(request);
    this.#options.connector.endLoad(request.id, Math.max(0, endBlock - firstBlock));
  }

  *arrivals(): Generator<Arrival> {
    for (const { request, endBlock, arrived } of this.#loads.values())
      if (request && arrived) yield { request, endBlock, load: arrived };
  }

  /** The step that is put together now imports it: the load ends with that step, whatever becomes of the request. */
  takeArrived(request: EngineRequest): void {
    const load = this.#of(request);
    load.cancelDeadline();
    load.arrived = undefined;
  }

  /** Copied beside the steps instead, as if it had never been offered. */
  decline(request: EngineRequest): void {
    this.#declined(this.#of(request));
  }

  /** The request has ended: so does its load, for others wait for its place. Its blocks are freed when the connector is done with them. */
  abandon(request: EngineRequest): void {
    const load = this.#of(request);
    load.request = undefined;
    load.cancelDeadline();
    this.#options.connector.endLoad(request.id, 0); // first: what is declined is copied else
    this.#declined(load);
  }

  #of(request: EngineRequest): Load {
    const load = this.#loads.get(request.id);
    invariant(load?.request === request, () => `request ${request.id}: has no load`);
    return load;
  }

  #declined(load: Load): void {
    const { arrived } = load;
    load.arrived = undefined;
    arrived?.decline();
  }

  #end(id: string, load: Load, end: LoadEnd): void {
    const current = this.#loads.get(id);
    invariant(current, () => `request ${id}: the connector ended its load twice`);
    if (load.isAwaited) this.#awaitedCount--;
    else this.#blocks -= end.wanted;
    load.cancelDeadline();
    // Of one that its request has left behind for another: says nothing of what that one's blocks hold.
    if (current !== load) return;
    this.#loads.delete(id);
    if (load.request) {
      this.#options.onEnd(load.request, end);
      return;
    }
    this.#options.kv.free(id);
    this.#options.onFreed();
  }

  #expire(id: string): void {
    const request = this.#loads.get(id)?.request;
    if (!request) return;
    // A step that computes the head of this hit writes to the table: it is left when that is over.
    if (request.head && request.executing) request.head.isOverdue = true;
    else this.giveUp(request);
  }

  /** Its deadline has passed. */
  giveUp(request: EngineRequest): void {
    const load = this.#of(request);
    const { id } = request;
    load.request = undefined;
    this.#declined(load);
    this.#expiredCount++;
    this.#options.connector.forget(id);
    request.id = `${id}+${this.#expiredCount}`; // the old table stays with the load
    this.#options.onEnd(request, undefined);
  }
}

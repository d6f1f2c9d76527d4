/**
 * The connector to a cache node: the `Connector` port over a session (session-client.ts), with the executor's copies.
 *
 * Invariants (the port's): nothing throws at the scheduler, nothing waits without a deadline, each callback fires
 * exactly once and never from inside the call. Blocks in flight are bounded; what exceeds the bound is not stored.
 */
import { invariant } from '@kvtier/errors';
import type { Executor } from '@kvtier/executor';
import type { StatsResult } from '@kvtier/wire';
import type { Connector, LoadResult, Match } from './connector.ts';
import { type ConnectorCounters, count, newCounters } from './counters.ts';
import { LoadRun } from './load.ts';
import { MatchTable } from './matches.ts';
import { LoadPlanner } from './planner.ts';
import { type ConnectorLogger, SessionClient } from './session-client.ts';
import { runStore } from './store.ts';
import { realTimers, type Timers } from './timers.ts';

export interface ConnectorOptions {
  /** Unix socket of the cache node. */
  readonly socketPath: string;
  readonly executor: Pick<Executor, 'kv' | 'attachArena' | 'detachArena' | 'exportBlocks' | 'importBlocks'>;
  /** 32-byte namespace digest: everything that two engines must have in common to share a block. */
  readonly namespace: Uint8Array;
  /** 32 for sha256*, 16 for xxhash*. */
  readonly hashBytes: number;
  /** No load takes longer, whatever it saves. */
  readonly loadDeadlineMs: number;
  /** A lookup that takes longer counts as a miss; default: a share of the time to compute what it asks for. */
  readonly lookupDeadlineMs?: number;
  /** Blocks that may be on their way out at a time. */
  readonly maxStoreBlocks?: number;
  readonly logger: ConnectorLogger;
  /** A match that was pending is known. */
  readonly onWake: () => void;
  readonly timers?: Timers;
}

export interface NodeConnector extends Connector {
  readonly counters: Readonly<ConnectorCounters>;
  /** Attached, but the node does not answer and is left alone until it does. */
  readonly suspended: boolean;
  /** Blocks whose copy or confirmation is outstanding. */
  readonly storingBlocks: number;
  /** The node's own statistics; null when it is away or slow. */
  stats(deadlineMs?: number): Promise<StatsResult | null>;
}

const defaultMaxStoreBlocks = 4_096;
/** When closing, stores in flight may take this long to be confirmed. */
const drainDeadlineMs = 2_000;
const maxStores = 64;

export function createConnector(options: ConnectorOptions): NodeConnector {
  return new CacheNodeConnector(options);
}

class CacheNodeConnector implements NodeConnector {
  readonly counters: ConnectorCounters = newCounters();
  readonly #options: ConnectorOptions;
  readonly #timers: Timers;
  readonly #planner: LoadPlanner;
  readonly #matches: MatchTable;
  readonly #client: SessionClient;
  readonly #stores = new Set<Promise<void>>();
  readonly #maxStoreBlocks: number;
  #storingBlocks = 0;
  #closing = false;

  constructor(options: ConnectorOptions) {
    const { kv } = options.executor;
    this.#options = options;
    this.#timers = options.timers ?? realTimers;
    this.#maxStoreBlocks = options.maxStoreBlocks ?? defaultMaxStoreBlocks;
    this.#planner = new LoadPlanner(kv.blockTokens, options.loadDeadlineMs);
    this.#matches = new MatchTable({
      hashBytes: options.hashBytes,
      lookupDeadlineMs: options.lookupDeadlineMs,
      planner: this.#planner,
      timers: this.#timers,
      counters: this.counters,
      onWake: options.onWake,
    });
    this.#client = new SessionClient({
      ...options,
      payloadBytes: kv.blockBytes,
      blockTokens: kv.blockTokens,
      timers: this.#timers,
      counters: this.counters,
    });
  }

  get attached(): boolean {
    return this.#client.session !== null;
  }

  get suspended(): boolean {
    return this.#client.suspended;
  }

  get storingBlocks(): number {
    return this.#storingBlocks;
  }

  match(requestId: string, hashes: Buffer, localBlocks: number): Match {
    return this.#matches.match(this.#client.session, requestId, hashes, localBlocks);
  }

  load(
    requestId: string,
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onDone: (result: LoadResult) => void,
  ): void {
    const { executor, hashBytes } = this.#options;
    const { blockBytes } = executor.kv;
    const blocks = blockIds.length;
    invariant((firstBlock + blocks) * hashBytes <= hashes.length, 'load: more blocks than hashes');
    const startedAtMs = this.#timers.nowMs();
    const session = this.#client.session;
    if (session === null || blocks === 0) {
      if (blocks > 0) count(this.counters, 'load', 'no session');
      this.#matches.settle(requestId, firstBlock, blocks === 0);
      queueMicrotask(() => onDone({ loaded: 0, byTier: {}, elapsedUs: 0 }));
      return;
    }
    this.counters.loads++;
    const context = {
      session,
      executor,
      timers: this.#timers,
      counters: this.counters,
      onCopied: (copied: number, elapsedUs: number) => this.#planner.observeCopy(copied, elapsedUs),
    };
    const predictedUs = this.#matches.predictedUs(requestId, firstBlock, blocks);
    const wanted = hashes.subarray(firstBlock * hashBytes, (firstBlock + blocks) * hashBytes);
    new LoadRun(context, wanted, blockIds, this.#planner.deadlineMs(blocks), ({ loaded, byTier }) => {
      const elapsedUs = Math.round((this.#timers.nowMs() - startedAtMs) * 1_000);
      this.counters.loadedBlocks += loaded;
      this.counters.loadedBytes += loaded * blockBytes;
      this.counters.loadUs += elapsedUs;
      // A load that failed early says nothing about speed.
      if (predictedUs !== undefined && (loaded === blocks || elapsedUs > predictedUs)) {
        this.#planner.observeLoad(predictedUs, elapsedUs, this.#timers.nowMs());
      }
      this.#matches.settle(requestId, firstBlock + loaded, loaded === blocks);
      onDone({ loaded, byTier, elapsedUs });
    });
  }

  store(hashes: Buffer, firstBlock: number, blockIds: Int32Array, onReleased: () => void): void {
    const { executor, hashBytes } = this.#options;
    invariant((firstBlock + blockIds.length) * hashBytes <= hashes.length, 'store: more blocks than hashes');
    const session = this.#client.session;
    // The first blocks of a chain are worth most: take as many as fit.
    const room = this.#stores.size < maxStores ? this.#maxStoreBlocks - this.#storingBlocks : 0;
    const blocks = session === null || this.#closing ? 0 : Math.min(room, blockIds.length);
    if (blocks < blockIds.length) {
      count(this.counters, 'store', session === null ? 'no session' : 'too many in flight', blockIds.length - blocks);
    }
    if (session === null || blocks === 0) {
      queueMicrotask(onReleased);
      return;
    }
    this.counters.stores++;
    this.#storingBlocks += blocks;
    const context = { session, executor, counters: this.counters, blockBytes: executor.kv.blockBytes };
    const at = firstBlock * hashBytes;
    const parent = hashes.subarray(Math.max(0, at - hashBytes), at);
    const wanted = hashes.subarray(at, at + blocks * hashBytes);
    const run = runStore(context, parent, wanted, blockIds.slice(0, blocks), onReleased).finally(() => {
      this.#storingBlocks -= blocks;
      this.#stores.delete(run);
    });
    this.#stores.add(run);
  }

  forget(requestId: string): void {
    this.#matches.forget(requestId);
  }

  observePrefill(tokens: number, elapsedUs: number): void {
    this.#planner.observePrefill(tokens, elapsedUs);
  }

  async stats(deadlineMs = 200): Promise<StatsResult | null> {
    const call = this.#client.session?.link.call({ $case: 'stats', value: {} }, 'stats', deadlineMs);
    return (await call?.catch(() => null)) ?? null;
  }

  async close(): Promise<void> {
    this.#closing = true;
    let cancel = (): void => {};
    const patience = new Promise<void>((resolve) => {
      cancel = this.#timers.after(drainDeadlineMs, resolve);
    });
    await Promise.race([Promise.all(this.#stores), patience]);
    cancel();
    await this.#client.close();
  }
}

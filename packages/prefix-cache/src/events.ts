/**
 * What changed in the pool, for routers and indexes (vLLM's kv_events, camelCase). Collected in memory and drained with
 * `take`; off by default. Bounded: past `maxEvents` undrained ones the oldest half is dropped and counted, so that a
 * consumer that went away cannot eat the engine's memory; it learns of the gap from `dropped`.
 */
import type { HashKey } from '@kvtier/identity';

export interface BlockStored {
  readonly type: 'BlockStored';
  readonly blockHashes: readonly HashKey[];
  /** Hash before the first one; null at the root. */
  readonly parentBlockHash: HashKey | null;
  /** The whole range, also of blocks that were skipped. */
  readonly tokenIds: readonly number[];
  readonly blockSize: number;
  readonly loraId: number | null;
  readonly loraName: string | null;
  readonly medium: 'GPU';
  /** One entry per hash; null when there is no hash. */
  readonly extraKeys: readonly (readonly unknown[] | null)[] | null;
  readonly groupIdx: number;
  readonly kvCacheSpecKind: string;
  readonly kvCacheSpecSlidingWindow: number | null;
}

export interface BlockRemoved {
  readonly type: 'BlockRemoved';
  readonly blockHashes: readonly HashKey[];
  readonly medium: 'GPU';
  readonly groupIdx: number;
}

export interface AllBlocksCleared {
  readonly type: 'AllBlocksCleared';
}

export type KvCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared;

export class EventLog {
  readonly enabled: boolean;
  readonly #maxEvents: number;
  #events: KvCacheEvent[] = [];
  #dropped = 0;

  constructor(enabled: boolean, maxEvents = 100_000) {
    this.enabled = enabled;
    this.#maxEvents = maxEvents;
  }

  /** Events lost because nobody drained them. */
  get dropped(): number {
    return this.#dropped;
  }

  add(event: KvCacheEvent): void {
    if (!this.enabled) return;
    if (this.#events.length >= this.#maxEvents) {
      const half = this.#maxEvents >> 1;
      this.#dropped += this.#events.length - half;
      this.#events = this.#events.slice(this.#events.length - half);
    }
    this.#events.push(event);
  }

  take(): KvCacheEvent[] {
    const events = this.#events;
    this.#events = [];
    return events;
  }
}

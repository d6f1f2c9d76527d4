/**
 * How the worker gets its connector: as an argument, because connectors stand between the engine and the store. The process that
 * runs the worker brings one along (`services/engine-worker/src/main.ts`).
 */

import type { Executor } from '@kvtier/executor';
import type { Connector } from '@kvtier/scheduler';
import type { Logger } from '@kvtier/telemetry';
import type { StatsResult } from '@kvtier/wire';

/** A connector, and what the worker's metrics read of it. */
export interface WorkerConnector extends Connector {
  /** Counts by name; `reasons` by "operation: reason". */
  readonly counters: Readonly<Record<string, number | Readonly<Record<string, number>>>> & {
    readonly reasons: Readonly<Record<string, number>>;
  };
  /** Attached, but the node does not answer and is left alone until it does. */
  readonly suspended: boolean;
  /** The node's own statistics; null when it is away or slow. */
  stats(deadlineMs?: number): Promise<StatsResult | null>;
}

export interface OpenConnectorOptions {
  /** Unix socket of the cache node. */
  readonly socketPath: string;
  /** The node may be of another user, if its socket's folder is of this group; null: only of our own, or root. */
  readonly group: number | null;
  /** Where this process sees the folder of the node's arena; undefined: where the node sees it. */
  readonly arenaDir: string | undefined;
  readonly executor: Executor;
  /** 32-byte digests, one per attention group. */
  readonly namespace: readonly Uint8Array[];
  readonly hashBytes: number;
  readonly loadDeadlineMs: number;
  /** always: also where computing would be faster. */
  readonly loads: 'planned' | 'always' | 'halves';
  readonly tenant: string;
  /** 0: blocks do not expire. */
  readonly ttlSeconds: number;
  readonly logger: Logger;
  /** A match that was pending is known. */
  readonly onWake: () => void;
  /** Blocks, by tier, that are held and rather computed: to load them would have taken so long. */
  readonly onPassed: (byTier: Readonly<Record<string, number>>, us: number) => void;
}

export type OpenConnector = (options: OpenConnectorOptions) => WorkerConnector;

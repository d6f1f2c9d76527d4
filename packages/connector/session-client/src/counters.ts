/** What the connector did, counted for telemetry. Every outcome that is not a success has a reason. */

export interface ConnectorCounters {
  /** Sessions that were attached, since the start; more than 1: the node was away in between. */
  sessions: number;
  /** Times that a silent node was left alone until it answered again (the circuit breaker opened). */
  suspensions: number;
  /** Frames of a newer node, of a kind that this engine does not know; skipped. */
  unknownAnswers: number;
  lookups: number;
  /** Prompts that no lookup was made for: the node's table of held blocks says that none would find anything worth loading. */
  unasked: number;
  /** Prompts that no lookup was made for: by that table, all of them that is held lies in the arena. */
  unaskedHits: number;
  /** Blocks that lookups found, or that table. */
  heldBlocks: number;
  /** Of those, blocks that the planner chose to load. */
  plannedBlocks: number;
  loads: number;
  loadedBlocks: number;
  loadedBytes: number;
  loadUs: number;
  stores: number;
  storedBlocks: number;
  storedBytes: number;
  /** Chains of waiting requests that the node brings up ahead. */
  prefetches: number;
  /** Blocks that the node need not bring up any more, because their request was gone first. */
  cancelledPrefetchBlocks: number;
  /** By operation and reason, e.g. "load: deadline" or "store: held": loads that fell short, blocks not stored. */
  readonly reasons: Record<string, number>;
}

export const newCounters = (): ConnectorCounters => ({
  sessions: 0,
  suspensions: 0,
  unknownAnswers: 0,
  lookups: 0,
  unasked: 0,
  unaskedHits: 0,
  heldBlocks: 0,
  plannedBlocks: 0,
  loads: 0,
  loadedBlocks: 0,
  loadedBytes: 0,
  loadUs: 0,
  stores: 0,
  storedBlocks: 0,
  storedBytes: 0,
  prefetches: 0,
  cancelledPrefetchBlocks: 0,
  reasons: {},
});

/** A reason may come from the peer: beyond this many different ones they are counted together. */
const maxReasons = 64;

export function count(
  counters: ConnectorCounters,
  operation: 'lookup' | 'load' | 'store' | 'prefetch',
  reason: string,
  by = 1,
): void {
  let name = `${operation}: ${reason}`;
  const { reasons } = counters;
  if (!Object.hasOwn(reasons, name) && Object.keys(reasons).length >= maxReasons) name = `${operation}: other`;
  reasons[name] = (reasons[name] ?? 0) + by;
}

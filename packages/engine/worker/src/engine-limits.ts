/** The engine's bounds, from the worker's configuration. */
import type { EngineWorkerConfig } from '@kvtier/config';
import type { EngineLimits } from '@kvtier/scheduler';

/** The connector ends each load by `loadDeadlineMs`; so long after it the engine no longer believes that it will. */
const graceMs = 2_000;
const leastMs = 30_000;

export function engineLimits(
  { maxSequences, maxWaiting, loadDeadlineMs }: EngineWorkerConfig,
  maxStepTokens: number,
): EngineLimits {
  return { maxStepTokens, maxSequences, maxWaiting, loadDeadlineMs: Math.max(leastMs, loadDeadlineMs + graceMs) };
}

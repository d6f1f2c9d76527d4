/** What the store says about its tiers: their own stats, and what the store knows of each. */
import type { Tier, TierStats } from '@kvtier/tiers';
import type { BreakerState } from './breaker.ts';
import type { TierGate } from './tier-gate.ts';
import type { WriteDown } from './write-down.ts';

export interface TierReport extends TierStats {
  readonly breaker: BreakerState;
  /** Why the breaker is not closed; '' while it is. */
  readonly breakerReason: string;
  /** Blocks that were not written to it, by reason. */
  readonly refusals: Readonly<Record<string, number>>;
  readonly detail: Readonly<Record<string, number>>;
}

export interface StoreStats {
  readonly tiers: readonly TierReport[];
  readonly counters: Readonly<Record<string, number>>;
}

/** `tiers`: the arena, then the lower ones in the order of `gates` and `writeDowns`; `hits` and `misses` in that of `tiers`. */
export function tierReports(
  tiers: readonly Tier[],
  gates: readonly TierGate[],
  writeDowns: readonly WriteDown[],
  counters: Readonly<Record<string, number>>,
  hits: readonly number[],
  misses: readonly number[],
): TierReport[] {
  return tiers.map((tier, bit) => {
    const stats = tier.stats();
    const gate = gates[bit - 1];
    const prefix = `writedown.${tier.name}.refused.`;
    const refusals = Object.entries(counters).filter(([name]) => name.startsWith(prefix));
    const known: Record<string, number> =
      gate === undefined
        ? {}
        : {
            breaker_opened: gate.opened,
            read_inflight_bytes: gate.inFlightBytes,
            read_bytes_per_second: Math.round(gate.bytesPerUs * 1e6),
            write_pending_bytes: writeDowns[bit - 1]!.pendingBytes,
            write_dirty_bytes: writeDowns[bit - 1]!.dirtyBytes,
          };
    return {
      ...stats,
      hits: hits[bit]!,
      misses: misses[bit]!,
      breaker: gate?.state ?? 'closed',
      breakerReason: gate?.reason ?? '',
      refusals: Object.fromEntries(refusals.map(([name, count]) => [name.slice(prefix.length), count])),
      detail: { ...stats.detail, ...known },
    };
  });
}

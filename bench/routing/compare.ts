/**
 * Policies in the same simulated cluster, on one trace, at three loads. Their queues have no limit and refuse nobody, so that all serve the
 * same requests; a coordinator's queue has one (`lateShare`).
 */
import { coordinatorSchema } from '@kvtier/config';
import { type PolicyName, policies } from '@kvtier/routing';
import type { Trace } from '../traces.ts';
import { type Outcome, simulate } from './cluster.ts';
import type { Hardware } from './hardware.ts';

export const loads = { half: 0.5, full: 1, twice: 2 } as const;
export type Load = keyof typeof loads;
/** Our own: late binding over least predicted time. */
export const ours = 'kvtier';

export interface Row {
  readonly policy: string;
  readonly load: Load;
  readonly ttftP50S: number;
  readonly ttftP90S: number;
  readonly ttftP99S: number;
  /**
   * Of the requests: whose first token comes later than a coordinator keeps one waiting (`routing.maxWaitMs`). Most of these it would
   * refuse with 429, and those behind them would be served sooner; here they count as served.
   */
  readonly lateShare: number;
  /** Prompt tokens a second (throughput.ts). */
  readonly tokensPerS: number;
  /** Of the prompt tokens: found at the worker, brought from another host. */
  readonly hitRatio: number;
  readonly peerRatio: number;
  /** Bytes that were brought from host memories, and over the network. */
  readonly hostBytes: number;
  readonly peerBytes: number;
  readonly imbalance: number;
}

/** Ties are drawn: of a few hundred requests the p90 of one draw is up to half off that of another. */
const seeds = [1, 2, 3];
/** Others whose p90 is at most so many times that of the best one may be the best by another draw. */
const near = 1.5;
/** As coordinators are configured unless told otherwise. */
const maxWaitS = coordinatorSchema.parse({ engine: 'unix:/none', port: 0 }).routing.maxWaitMs / 1_000;
/** All requests come at once. */
const flood = Number.POSITIVE_INFINITY;

/** How many times as fast as recorded the cluster serves the trace when it is flooded and requests go to the least loaded. */
export function saturation(trace: Trace, hardware: Hardware): number {
  // Of a single request, whatever the speed is.
  const spanS = (trace.arrivalsMs.at(-1)! - trace.arrivalsMs[0]!) / 1000 || 1;
  const { saturatedTokensPerS, promptTokens } = simulate(trace, policies['least-loaded'](), hardware, flood, seeds[0]!);
  return (spanS * saturatedTokensPerS) / promptTokens;
}

/** Each policy by one draw; ours and those that are near the best of the others by the median of several, of their p90. */
export function compare(trace: Trace, hardware: Hardware, onRow: (row: Row) => void): Row[] {
  const speed = saturation(trace, hardware);
  const all: Row[] = [];
  for (const [load, share] of Object.entries(loads) as [Load, number][]) {
    const drawn = (name: string, seed: number): Row => {
      const policy = name === ours ? ('late' as const) : policies[name as PolicyName]();
      return rowOf(name, load, hardware, simulate(trace, policy, hardware, speed * share, seed));
    };
    const rows = [ours, ...Object.keys(policies)].map((name) => drawn(name, seeds[0]!));
    const best = Math.min(...rows.flatMap(({ policy, ttftP90S }) => (policy === ours ? [] : [ttftP90S])));
    for (const row of rows) {
      const others = row.policy === ours || row.ttftP90S <= near * best ? seeds.slice(1) : [];
      const draws = [row, ...others.map((seed) => drawn(row.policy, seed))];
      const middle = draws.toSorted((a, b) => a.ttftP90S - b.ttftP90S)[draws.length >> 1]!;
      all.push(middle);
      onRow(middle);
    }
  }
  return all;
}

export function rowOf(policy: string, load: Load, { kvBytesPerToken }: Hardware, outcome: Outcome): Row {
  const sorted = outcome.ttftS.slice().sort();
  const at = (share: number): number => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))]!;
  return {
    policy,
    load,
    ttftP50S: at(0.5),
    ttftP90S: at(0.9),
    ttftP99S: at(0.99),
    lateShare: sorted.filter((s) => s > maxWaitS).length / sorted.length,
    tokensPerS: outcome.tokensPerS,
    hitRatio: outcome.localTokens / outcome.promptTokens,
    peerRatio: outcome.peerTokens / outcome.promptTokens,
    hostBytes: outcome.hostTokens * kvBytesPerToken,
    peerBytes: (outcome.peerTokens + outcome.copiedTokens) * kvBytesPerToken,
    imbalance: outcome.imbalance,
  };
}

const late = `> ${maxWaitS} s`.padStart(9);
export const header = `load   policy          TTFT p50      p90      p99${late}   tokens/s   found brought  host GB   net GB imbalance`;
export function line(row: Row): string {
  const seconds = [row.ttftP50S, row.ttftP90S, row.ttftP99S].map((s) => ` ${s.toFixed(3).padStart(8)}`).join('');
  const percent = (share: number): string => `${(100 * share).toFixed(1)} %`.padStart(8);
  const shares = [row.hitRatio, row.peerRatio].map(percent).join('');
  const moved = [row.hostBytes, row.peerBytes].map((bytes) => (bytes / 1e9).toFixed(0).padStart(9)).join('');
  const rate = row.tokensPerS.toFixed(0).padStart(11);
  return `${row.load.padEnd(7)}${row.policy.padEnd(15)}${seconds} ${percent(row.lateShare)}${rate}${shares}${moved}${row.imbalance.toFixed(2).padStart(10)}`;
}

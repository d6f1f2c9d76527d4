/** Policies in the same simulated cluster, on one trace, at three loads. */
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
  /** Prompt tokens a second, from the first arrival to the end. */
  readonly tokensPerS: number;
  /** Of the prompt tokens: found at the worker, brought from another host. */
  readonly hitRatio: number;
  readonly peerRatio: number;
  readonly imbalance: number;
}

const seed = 1;
/** All requests come at once, as good as. */
const flood = 1000;

/** How many times as fast as recorded the cluster serves the trace when it is flooded and requests go to the least loaded. */
export function saturation(trace: Trace, hardware: Hardware): number {
  const span = (trace.arrivalsMs.at(-1)! - trace.arrivalsMs[0]!) / 1000;
  return span / simulate(trace, policies['least-loaded'](), hardware, flood, seed).makespanS;
}

export function compare(trace: Trace, hardware: Hardware, onRow: (row: Row) => void): Row[] {
  const speed = saturation(trace, hardware);
  const rows: Row[] = [];
  for (const [load, share] of Object.entries(loads) as [Load, number][]) {
    for (const name of [ours, ...Object.keys(policies)]) {
      const policy = name === ours ? ('late' as const) : policies[name as PolicyName]();
      const row = rowOf(name, load, simulate(trace, policy, hardware, speed * share, seed));
      rows.push(row);
      onRow(row);
    }
  }
  return rows;
}

function rowOf(policy: string, load: Load, outcome: Outcome): Row {
  const sorted = outcome.ttftS.slice().sort();
  const at = (share: number): number => sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))]!;
  return {
    policy,
    load,
    ttftP50S: at(0.5),
    ttftP90S: at(0.9),
    ttftP99S: at(0.99),
    tokensPerS: outcome.promptTokens / outcome.makespanS,
    hitRatio: outcome.localTokens / outcome.promptTokens,
    peerRatio: outcome.peerTokens / outcome.promptTokens,
    imbalance: outcome.imbalance,
  };
}

export const header = 'load   policy          TTFT p50     p90     p99   tokens/s  found  brought  imbalance';
export function line({
  load,
  policy,
  ttftP50S,
  ttftP90S,
  ttftP99S,
  tokensPerS,
  hitRatio,
  peerRatio,
  imbalance,
}: Row): string {
  const seconds = [ttftP50S, ttftP90S, ttftP99S].map((s) => s.toFixed(3).padStart(8)).join('');
  const shares = [hitRatio, peerRatio].map((share) => `${(100 * share).toFixed(1)} %`.padStart(8)).join('');
  return `${load.padEnd(7)}${policy.padEnd(15)}${seconds}${tokensPerS.toFixed(0).padStart(11)}${shares}${imbalance.toFixed(2).padStart(9)}`;
}

/** Which pods may compute a prompt for a decode pod, and how much each has to do. */
import type { Worker } from '@kvtier/registry';
import type { PodWork } from './decision.ts';
import { endpointOf } from './endpoint.ts';

/** Of a pod that has not measured, while no other has. */
const unmeasuredTokensPerS = 4_000;
/** In one header. */
const maxNamed = 16;

export type PodList = readonly (Worker | undefined)[];

/** It computes prompts for others: by its role, or because it leans to that now. */
export const isPrefill = ({ record: { kind, role }, leaning }: Worker): boolean =>
  kind === 'openai' && (role === 'prefill' || (role === 'both' && (leaning === 'prefill' || leaning === 'mixed')));

/** It computes prompts for others and nothing else, as long as somebody else takes whole requests. */
export const isPrefillOnly = ({ record: { kind, role }, leaning }: Worker): boolean =>
  kind === 'openai' && (role === 'prefill' || (role === 'both' && leaning === 'prefill'));

/** Whether some pod of this model computes prompts for others, whether or not it takes requests now. */
export const hasPrefill = (workers: PodList, model: string): boolean =>
  workers.some((worker) => worker?.facts?.model === model && isPrefill(worker));

/**
 * Those that may prefill for `decode`: of its model and revision, another pod than itself, among those allowed; `named`: "HOST:PORT", or
 * several with commas, of which some are known.
 */
export function prefillersFor(
  workers: PodList,
  decode: Worker,
  among: ReadonlySet<string> | undefined,
  named?: string,
): Worker[] {
  const wanted = named === undefined ? undefined : namesOf(named);
  return workers.filter((worker): worker is Worker => {
    if (worker === undefined || worker.number === decode.number || !isPrefill(worker)) return false;
    if (worker.facts?.model !== decode.facts?.model || worker.record.revision !== decode.record.revision) return false;
    if (worker.state !== 'ready' || worker.record.draining) return false;
    if (among !== undefined && !among.has(worker.record.name)) return false;
    return wanted === undefined || wanted.has(endpointOf(worker.record) ?? '');
  });
}

const namesOf = (named: string): ReadonlySet<string> =>
  new Set(
    named
      .split(',', maxNamed)
      .map((name) => name.trim().toLowerCase())
      .filter((name) => name !== ''),
  );

export function workOf({ load: { tokensAhead, loadAheadS, prefillTokensPerS: rate } }: Worker): PodWork {
  const prefillTokensPerS = rate > 0 ? rate : unmeasuredTokensPerS;
  return { aheadS: Math.max(tokensAhead / prefillTokensPerS, loadAheadS), prefillTokensPerS };
}

/** The one that would be done first with so many tokens. */
export function leastAhead(workers: readonly Worker[], tokens: number): PodWork | undefined {
  let best: PodWork | undefined;
  let leastS = Number.POSITIVE_INFINITY;
  for (const worker of workers) {
    const work = workOf(worker);
    const doneS = work.aheadS + tokens / work.prefillTokensPerS;
    if (doneS >= leastS) continue;
    best = work;
    leastS = doneS;
  }
  return best;
}

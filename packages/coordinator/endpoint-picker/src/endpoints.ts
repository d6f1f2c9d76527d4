/** Workers as a gateway names them: "IP:PORT". Only pods with OpenAI's API can be reached through one. */
import { endpointOf, ipEndpointOf, isPrefillOnly } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';

export interface Candidate {
  readonly worker: Worker;
  readonly endpoint: string;
}

/** Workers that may be chosen for a gateway's request; `subset`: endpoints, or hosts of which any port will do. */
export function candidatesOf(
  workers: readonly (Worker | undefined)[],
  subset: readonly string[] | undefined,
): Candidate[] {
  const among = subset === undefined ? undefined : new Set(subset);
  return workers.flatMap((worker) => {
    if (worker === undefined || worker.state === 'refused') return [];
    const endpoint = ipEndpointOf(worker.record);
    if (endpoint === undefined) return [];
    const isIn = among === undefined || among.has(endpoint) || among.has(hostOf(endpoint));
    return isIn ? [{ worker, endpoint }] : [];
  });
}

/**
 * The endpoints that come after the chosen one if it cannot be reached: those that could have been chosen, with the least work first.
 * Each gets the chosen one's headers: where a `prefiller` is named there, those alone that can read what it computes.
 */
export function fallbacksOf(
  chosen: Worker,
  candidates: readonly Candidate[],
  count: number,
  prefiller: Worker | undefined,
): string[] {
  if (count === 0) return [];
  // Where the chosen one only prefills nobody else takes whole requests.
  const mayPrefillOnly = isPrefillOnly(chosen);
  const mayServe = (worker: Worker): boolean =>
    worker.state === 'ready' && !worker.record.draining && (mayPrefillOnly || !isPrefillOnly(worker));
  const maySplit = (worker: Worker): boolean =>
    prefiller === undefined ||
    (worker.number !== prefiller.number && worker.record.revision === chosen.record.revision);
  return candidates
    .filter(
      ({ worker }) =>
        worker.number !== chosen.number &&
        worker.facts?.model === chosen.facts?.model &&
        mayServe(worker) &&
        maySplit(worker),
    )
    .sort((a, b) => requestsOf(a.worker) - requestsOf(b.worker) || a.worker.number - b.worker.number)
    .slice(0, count)
    .map(({ endpoint }) => endpoint);
}

const requestsOf = ({ load }: Worker): number => load.waiting + load.running;

/** "[::1]:80" → "::1", "10.0.0.1:80" → "10.0.0.1" */
function hostOf(endpoint: string): string {
  const host = endpoint.slice(0, endpoint.lastIndexOf(':'));
  return host.startsWith('[') ? host.slice(1, -1) : host;
}

/** What is refused does not mend itself: whoever runs this learns why, and what to do. */
export function whyNone(workers: readonly (Worker | undefined)[], subset: readonly string[] | undefined): string {
  const what =
    subset === undefined
      ? 'No endpoint is known that a gateway can reach'
      : `None of the ${subset.length} endpoints that the gateway allows is known here`;
  const refused = workers.find((worker) => worker?.state === 'refused' && worker.record.kind === 'openai')?.why;
  return `${what}; ${refused ?? whyUnnamed(workers) ?? 'try again in a moment.'}`;
}

function whyUnnamed(workers: readonly (Worker | undefined)[]): string | undefined {
  const named = workers.find(
    (worker) =>
      worker !== undefined && endpointOf(worker.record) !== undefined && ipEndpointOf(worker.record) === undefined,
  );
  if (named === undefined) return undefined;
  const { name, address } = named.record;
  return `worker ${name}: ${address} has a host's name, and a gateway takes IP:PORT alone; write its IP`;
}

/** Workers as a gateway names them: "IP:PORT". Only pods with OpenAI's API can be reached through one. */
import { endpointOf } from '@kvtier/pod-handoff';
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
    const endpoint = endpointOf(worker.record);
    if (endpoint === undefined) return [];
    const isIn = among === undefined || among.has(endpoint) || among.has(hostOf(endpoint));
    return isIn ? [{ worker, endpoint }] : [];
  });
}

/** The endpoints that come after the chosen one if it cannot be reached: same model, ready, those with the least work first. */
export function fallbacksOf(chosen: Worker, candidates: readonly Candidate[], count: number): string[] {
  if (count === 0) return [];
  return candidates
    .filter(
      ({ worker }) =>
        worker.number !== chosen.number && worker.state === 'ready' && worker.facts?.model === chosen.facts?.model,
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

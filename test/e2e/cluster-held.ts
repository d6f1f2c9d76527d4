/** What a cluster of real processes still holds for requests: at rest nothing. */
import type { ClusterRig } from './cluster-rig.ts';

const engineGauges = ['waiting', 'running', 'loading', 'awaiting', 'export_blocks'].map(
  (name) => `kvtier_engine_${name}`,
);
const nodeGauges = ['await.blocks', 'arena.pinned_blocks', 'fetch.inflight_bytes'];

/** Members by their numbers. */
export interface Asked {
  readonly workers: readonly number[];
  readonly nodes: readonly number[];
  readonly coordinators: readonly number[];
}

const numbers = (all: readonly unknown[]): number[] => [...all.keys()];

export const everybody = ({ workers, nodes, coordinators }: ClusterRig): Asked => ({
  workers: numbers(workers),
  nodes: numbers(nodes),
  coordinators: numbers(coordinators),
});

/** By what it is, of those that are asked, each by itself: who is beside somebody that is gone has to have let go, too; empty: nothing. */
export async function heldAt(rig: ClusterRig, { workers, nodes, coordinators }: Asked): Promise<string[]> {
  const left: string[] = [];
  for (const worker of workers) {
    const metrics = await rig.workerMetrics(worker);
    const of = (name: string): number => metrics.get(name) ?? Number.NaN;
    const blocks = of('kvtier_engine_block_count') - 1 - of('kvtier_engine_free_blocks');
    for (const [name, value] of [['blocks', blocks], ...engineGauges.map((each) => [each, of(each)])] as const)
      if (value !== 0) left.push(`worker-${worker}: ${name} ${value}`);
  }
  for (const node of nodes) {
    const counters = await rig.nodeCounters(node);
    for (const name of nodeGauges)
      if (counters.get(name) !== 0) left.push(`node-${node}: ${name} ${counters.get(name)}`);
  }
  for (const coordinator of coordinators) {
    const legs = (await rig.metrics(coordinator)).get('kvtier_handoff_legs');
    if (legs !== 0) left.push(`coordinator-${coordinator}: legs ${legs}`);
  }
  return left;
}

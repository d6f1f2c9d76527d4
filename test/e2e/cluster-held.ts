/** What a cluster of real processes still holds for requests: at rest nothing. */
import type { ClusterRig } from './cluster-rig.ts';

const gauges = [
  ...['waiting', 'running', 'loading', 'awaiting', 'export_blocks'].map((name) => `kvtier_engine_${name}`),
  ...['await.blocks', 'arena.pinned_blocks', 'fetch.inflight_bytes'].map(
    (name) => `kvtier_node_events{event="${name}"}`,
  ),
];

/** By what it is, of these workers with their nodes, and of these coordinators; empty: nothing. */
export async function heldAt(
  rig: ClusterRig,
  workers: readonly number[],
  coordinators: readonly number[] = [0, 1],
): Promise<string[]> {
  const left: string[] = [];
  for (const worker of workers) {
    const metrics = await rig.workerMetrics(worker);
    const of = (name: string): number => metrics.get(name) ?? Number.NaN;
    const blocks = of('kvtier_engine_block_count') - 1 - of('kvtier_engine_free_blocks');
    for (const [name, value] of [['blocks', blocks], ...gauges.map((each) => [each, of(each)])] as const)
      if (value !== 0) left.push(`worker-${worker}: ${name} ${value}`);
  }
  for (const coordinator of coordinators) {
    const legs = (await rig.metrics(coordinator)).get('kvtier_handoff_legs');
    if (legs !== 0) left.push(`coordinator-${coordinator}: legs ${legs}`);
  }
  return left;
}

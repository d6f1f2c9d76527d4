/**
 * A prefix that is asked for often is copied ahead to the node of a worker that has just joined, over real processes: nobody computes it
 * there, and answers are the same from there. To the nodes of others while it is asked for: the planner's own tests.
 */
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { askAll } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';

/** All of one table: most of each prompt is the same, and so long that bringing it in is the faster way anywhere. */
const requests = sharedPrompts(64, 1, 100);
const patience = { timeout: 60_000, interval: 50 };
let rig: ClusterRig;

beforeAll(async () => {
  rig = await ClusterRig.start({ workers: 3, nodes: 3, coordinators: 1 });
  // Until it joins.
  for (const name of ['worker-2', 'node-2']) await rig.members.get(name)!.signal('SIGKILL');
}, 120_000);
afterAll(() => rig?.close());

const ended = async (why: string): Promise<number> =>
  (await rig.metrics()).get(`kvtier_copies_total{why="${why}",outcome="came"}`) ?? 0;

it('reaches who joins, before anybody asks it', { timeout: 240_000 }, async () => {
  const answers = await askAll(rig, requests, 4);
  // Nobody asks meanwhile: a request that comes first brings the prefix in by itself, and nothing is left to be copied.
  await Promise.all(['node-2', 'worker-2'].map((name) => rig.members.get(name)!.start()));
  await vi.waitUntil(async () => (await ended('new')) >= 1, patience);
  expect((await rig.metrics()).get('kvtier_copies_bytes_total')).toBeGreaterThan(0);
  expect((await rig.workerMetrics(2)).get('kvtier_node_events{event="prefetch.blocks.from.peer"}')).toBeGreaterThan(64);

  const again = await askAll(rig, requests.slice(0, 16), 4);
  expect(again.map(({ tokenIds }) => tokenIds)).toEqual(answers.slice(0, 16).map(({ tokenIds }) => tokenIds));
});

/**
 * A prefix that is asked for often is copied to the nodes of other workers ahead, and to the node of a worker that has just joined, over
 * real processes: nobody computes it there, and answers are the same from there.
 */
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { askAll } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';

/** All of one table: most of each prompt is the same. */
const requests = sharedPrompts(64, 1);
const patience = { timeout: 120_000, interval: 100 };
let rig: ClusterRig;

beforeAll(async () => {
  rig = await ClusterRig.start({ workers: 3, nodes: 3, coordinators: 1 });
  // Until it joins.
  for (const name of ['worker-2', 'node-2']) await rig.members.get(name)!.signal('SIGKILL');
}, 120_000);
afterAll(() => rig?.close());

const ended = async (why: string): Promise<number> =>
  (await rig.metrics()).get(`kvtier_copies_total{why="${why}",outcome="came"}`) ?? 0;

it('reaches others while it is asked for often, and who joins', { timeout: 300_000 }, async () => {
  const answers = await askAll(rig, requests, 4);
  let go = true;
  const load = (async () => {
    while (go) {
      const again = await askAll(rig, requests.slice(0, 16), 4);
      for (const [at, { tokenIds }] of again.entries()) expect(tokenIds).toEqual(answers[at]!.tokenIds);
    }
  })();
  try {
    // The second worker had it copied, or took requests first and brought it in for them.
    await Promise.all(['node-2', 'worker-2'].map((name) => rig.members.get(name)!.start()));
    await Promise.race([load, vi.waitUntil(async () => (await ended('new')) >= 1, patience)]);
  } finally {
    go = false;
    await load;
  }
  expect((await rig.metrics()).get('kvtier_copies_bytes_total')).toBeGreaterThan(0);
  expect((await rig.workerMetrics(2)).get('kvtier_node_events{event="prefetch.blocks.from.peer"}')).toBeGreaterThan(16);
});

/**
 * A cluster whose list of members and whose shared tier are in Redis: its master is killed, and another one stands still, under load. No
 * request fails, every answer is right, and no client waits for two seconds longer than in peace.
 */
import { afterAll, beforeAll, expect, it } from 'vitest';
import { type ServerGroup, startSentinel } from '../../infra/redis/servers.ts';
import { SteadyLoad } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';
import { CpuWaits } from './cpu-waits.ts';

const clients = 4;
const requests = sharedPrompts(24, 8);
const recoveryMs = 2_000;
const peaceMs = 1_500;
/** What Sentinel takes to find another master, and members and tiers to find it. */
const failoverMs = 5_000;

let servers: ServerGroup;
let rig: ClusterRig;
let right: readonly (readonly number[])[] = [];
beforeAll(async () => {
  const alone = await ClusterRig.start({ workers: 1, nodes: 0, coordinators: 1 });
  try {
    right = await Promise.all(requests.map(async (request) => (await alone.ask(request)).tokenIds));
  } finally {
    await alone.close();
  }
  servers = await startSentinel();
  const redis = { mode: 'sentinel', servers: servers.urls, masterName: 'kvtier' };
  // Engines have room for a few prompts only: the others come from below.
  rig = await ClusterRig.start({ workers: 2, nodes: 2, coordinators: 1, redis, kvBytes: 8 << 20 });
}, 120_000);
afterAll(async () => {
  await rig?.close();
  await servers?.stop();
});

const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

it('goes on while the master is killed, and while the next one stands still', { timeout: 120_000 }, async () => {
  const [first, second] = servers.servers;
  const load = new SteadyLoad(clients, async (at) => {
    const which = (at * 7) % requests.length;
    const answer = await rig.ask(requests[which]!);
    expect(answer.tokenIds).toEqual(right[which]);
    return answer;
  });
  const { answers, ended } = load;
  try {
    await Promise.race([pause(peaceMs), ended]); // caches are warm
    const peaceFromMs = performance.now();
    await Promise.race([pause(peaceMs), ended]);
    const usualMs = load.longestSince(peaceFromMs);
    for (const fault of ['SIGKILL', 'SIGSTOP'] as const) {
      const master = fault === 'SIGKILL' ? first! : second!;
      const begun = answers.length;
      const [sinceMs, waits] = [performance.now(), new CpuWaits(() => rig.stages)];
      if (fault === 'SIGKILL') await master.kill();
      else process.kill(master.pid, 'SIGSTOP');
      await Promise.race([pause(failoverMs), ended]);
      expect.soft(load.longestSince(sinceMs), fault).toBeLessThan(recoveryMs + usualMs + waits.ms);
      expect(answers.length, fault).toBeGreaterThan(begun + clients);
      if (fault === 'SIGKILL') {
        await master.start();
        await Promise.race([pause(1_500), ended]); // it becomes the replica of the other one
      } else process.kill(master.pid, 'SIGCONT');
    }
  } finally {
    await load.stop();
  }
  const ready = async (): Promise<unknown> => (await rig.metrics()).get('kvtier_workers{state="ready"}');
  await expect.poll(ready, { timeout: 20_000 }).toBe(2);
});

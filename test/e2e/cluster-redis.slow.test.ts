/**
 * A cluster whose list of members and whose shared tier are in Redis, of workers of both roles and of prefill and decode apart: its
 * master is killed, and another one stands still, under load. No request fails, every answer is right, and no client waits for two seconds
 * longer than in peace.
 */
import { afterEach, beforeAll, expect, it } from 'vitest';
import { type ServerGroup, startSentinel } from '../../infra/redis/servers.ts';
import { answersAlone, SteadyLoad } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';
import { CpuWaits } from './cpu-waits.ts';

const clients = 4;
const requests = sharedPrompts(24, 8);
const recoveryMs = 2_000;
const peaceMs = 1_500;
/** What Sentinel takes to find another master, and members and tiers to find it. */
const failoverMs = 5_000;

let servers: ServerGroup | undefined;
let rig: ClusterRig | undefined;
let right: readonly (readonly number[])[] = [];
beforeAll(async () => {
  right = await answersAlone(requests, clients);
}, 120_000);
afterEach(async () => {
  await rig?.close();
  await servers?.stop();
  [rig, servers] = [undefined, undefined];
});

const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

it.each([
  { what: 'workers of both roles', size: { workers: 2, nodes: 2 } },
  { what: 'prefill and decode workers', size: { workers: 2, prefill: 1, nodes: 2, handoff: { split: 'always' } } },
])(
  '$what go on while the master is killed, and while the next one stands still',
  { timeout: 120_000 },
  async ({ size }) => {
    servers = await startSentinel();
    const redis = { mode: 'sentinel', servers: servers.urls, masterName: 'kvtier' };
    // Engines have room for a few prompts only: the others come from below.
    const started = await ClusterRig.start({ ...size, coordinators: 2, redis, kvBytes: 8 << 20 });
    rig = started;
    const [first, second] = servers.servers;
    const load = new SteadyLoad(clients, async (at, number) => {
      const which = (at * 7) % requests.length;
      // Every other one's prompt nobody holds: there is always something to compute, and to hand over.
      const salt = number % 2 === 0 ? {} : { cache_salt: `${number}-${at}` };
      const answer = await started.ask({ ...requests[which]!, ...salt });
      expect(answer.tokenIds).toEqual(right[which]);
      expect(answer.failures).toEqual([]);
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
        const [sinceMs, waits] = [performance.now(), new CpuWaits(() => started.stages)];
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
    const split = answers.filter(({ handOff }) => handOff.startsWith('split '));
    expect(split.length > answers.length / 8).toBe('prefill' in size);
    const ready = async (): Promise<unknown> => (await started.metrics()).get('kvtier_workers{state="ready"}');
    await expect.poll(ready, { timeout: 20_000 }).toBe(2);
  },
);

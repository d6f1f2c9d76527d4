/**
 * A cluster whose list of members and whose shared tier are in Redis, of workers of both roles and of prefill and decode apart: its
 * master is killed, and another one stands still, under load. No request fails, every answer is right, and no client waits for two seconds
 * longer than in peace.
 */
import { afterEach, beforeAll, expect, it } from 'vitest';
import { type RedisServer, type ServerGroup, startSentinel } from '../../infra/redis/servers.ts';
import { answersAlone, SteadyLoad } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';
import { CpuWaits } from './cpu-waits.ts';

const clients = 4;
const requests = sharedPrompts(24, 8);
const recoveryMs = 2_000;
const peaceMs = 1_500;
/** What Sentinel takes to find another master on a machine that does many other things; one that was not run for 2 s does nothing for 30 s. */
const failoverMs = 45_000;

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

/** All Sentinels name it. */
async function isMaster(one: RedisServer): Promise<boolean> {
  for (const sentinel of servers!.servers.slice(2)) {
    const named = await sentinel.cli('sentinel', 'get-master-addr-by-name', 'kvtier');
    if (named.split('\n')[1] !== String(one.port)) return false;
  }
  return true;
}

/** It follows its master, and could take its place. */
async function isReplica(one: RedisServer): Promise<boolean> {
  const info = await one.ask('info replication');
  return info.includes('role:slave') && info.includes('master_link_status:up');
}

/** Asked now and then, so that it costs those little that are tested. */
async function comes(isSo: () => Promise<boolean>, what: string, ended: Promise<unknown>): Promise<void> {
  const endMs = performance.now() + failoverMs;
  while (!(await isSo())) {
    expect(performance.now(), `${what}: not within ${failoverMs} ms`).toBeLessThan(endMs);
    await Promise.race([pause(100), ended]);
  }
}

it.each([
  { what: 'workers of both roles', size: { workers: 2, nodes: 2 } },
  { what: 'prefill and decode workers', size: { workers: 2, prefill: 1, nodes: 2, handoff: { split: 'always' } } },
])(
  '$what go on while the master is killed, and while the next one stands still',
  { timeout: 240_000 },
  async ({ size }) => {
    servers = await startSentinel();
    const redis = { mode: 'sentinel', servers: servers.urls, masterName: 'kvtier' };
    // Engines have room for a few prompts only: the others come from below.
    // No coordinator is ever out, so no client has a reason to leave because of silence: how long it waits is what is judged.
    const started = await ClusterRig.start({ ...size, coordinators: 2, redis, kvBytes: 8 << 20, silentMs: 60_000 });
    rig = started;
    const [first, second] = servers.servers as [RedisServer, RedisServer];
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
      for (const [fault, master, next] of [
        ['SIGKILL', first, second],
        ['SIGSTOP', second, first],
      ] as const) {
        expect([await isMaster(master), await isReplica(next)], fault).toEqual([true, true]);
        const begun = answers.length;
        const [sinceMs, waits] = [performance.now(), new CpuWaits(() => started.stages)];
        if (fault === 'SIGKILL') await master.kill();
        else master.signal('SIGSTOP');
        await comes(() => isMaster(next), `${fault}: another master`, ended);
        // Whoever waits still is answered, and each has asked anew and has that answer, too.
        const restFromMs = performance.now();
        while (!load.allAskedSince(restFromMs) && performance.now() < restFromMs + 30_000)
          await Promise.race([pause(20), ended]);
        expect.soft(load.longestSince(sinceMs), fault).toBeLessThan(recoveryMs + usualMs + waits.ms);
        expect(answers.length, fault).toBeGreaterThan(begun + clients);
        if (fault === 'SIGSTOP') master.signal('SIGCONT');
        else {
          await master.start();
          // Sentinel lets one that says that it is a master be for some seconds.
          await comes(() => isReplica(master), `${fault}: it follows the other one`, ended);
        }
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

/**
 * Each process of a cluster in turn is killed and stopped under load: no request fails, every answer is right, and two seconds later
 * all is as before. What counts is the longest time that any client waits for its answer, beyond what it waits in peace and what a busy
 * machine keeps the processes waiting for a CPU. Two seconds after a death or a standstill under load nobody holds anything for who is gone:
 * no request, block, pinned slot or hand-off. KVTIER_CLUSTER_DEATHS=^node- has those of such a name alone.
 */
import { afterEach, beforeAll, expect, it } from 'vitest';
import { type Asked, everybody, heldAt } from './cluster-held.ts';
import { answersAlone, SteadyLoad } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';
import { CpuWaits } from './cpu-waits.ts';

const clients = 4;
const requests = sharedPrompts(24, 6);
/** Full service again, from the death or standstill on. */
const recoveryMs = 2_000;
const peaceMs = 3_000;
/** Nothing that a process held, or that was held for it, outlives it by more. */
const leaseMs = 2_000;
/** Of what a request had that has just been answered. */
const restMs = 500;
const report = (line: string): void => {
  if (process.env.KVTIER_CLUSTER_REPORT) process.stderr.write(`${line}\n`);
};

let right: readonly (readonly number[])[] = [];
let rig: ClusterRig | undefined;

beforeAll(async () => {
  right = await answersAlone(requests, clients);
}, 300_000);
afterEach(() => rig?.close());

/** A client that finds a coordinator silent leaves; how long it waits in all is what is judged. */
const isPatient = (failure: string): boolean => !failure.includes('says nothing');

/** One that has no answer yet is a reason, too: a service that has just started may not have said all. */
const heldNow = (cluster: ClusterRig, asked: Asked): Promise<string[]> =>
  heldAt(cluster, asked).catch((error: unknown) => [String(error)]);

const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

it.each([
  { what: 'workers of both roles', size: { workers: 2, nodes: 2, coordinators: 2 } },
  {
    what: 'prefill and decode workers',
    size: { workers: 3, prefill: 1, nodes: 3, coordinators: 2, handoff: { split: 'always' } },
  },
])('$what are as before two seconds after each death and each standstill', { timeout: 600_000 }, async (cluster) => {
  const started = await ClusterRig.start(cluster.size);
  rig = started;
  let loads = 0;
  const loaded = (): SteadyLoad => {
    const name = ++loads;
    return new SteadyLoad(clients, async (at, number) => {
      const which = (at * 7) % requests.length;
      // Apart, nobody holds anything of a prompt, so that there is always something to hand over.
      const salt = cluster.size.prefill === undefined ? {} : { cache_salt: `${name}-${number}-${at}` };
      const answer = await started.ask({ ...requests[which]!, ...salt });
      expect(answer.tokenIds).toEqual(right[which]);
      expect(answer.failures.filter(isPatient)).toEqual([]);
      return answer;
    });
  };
  const chosen = new RegExp(process.env.KVTIER_CLUSTER_DEATHS ?? '');
  const isChosen = (name: string): boolean => chosen.test(name);
  const load = loaded();
  const { answers, ended } = load;
  try {
    await Promise.race([pause(peaceMs), ended]); // caches are warm
    const peaceFromMs = performance.now();
    await Promise.race([pause(peaceMs), ended]);
    const usualMs = load.longestSince(peaceFromMs);
    report(`${cluster.what}: in peace the longest answer takes ${usualMs.toFixed(0)} ms`);
    for (const signal of ['SIGKILL', 'SIGSTOP'] as const) {
      for (const [name, service] of started.members) {
        if (!isChosen(name)) continue;
        const waits = new CpuWaits(() => started.stages);
        const sinceMs = performance.now();
        await service.signal(signal);
        const back =
          signal === 'SIGKILL' ? service.start() : pause(2 * recoveryMs).then(() => service.signal('SIGCONT'));
        await Promise.race([Promise.all([back, pause(recoveryMs)]), ended]);
        // Whoever waits still is answered, and each has asked anew and has that answer, too.
        const restFromMs = performance.now();
        while (!load.allAskedSince(restFromMs) && performance.now() < restFromMs + 30_000)
          await Promise.race([pause(20), ended]);
        const longestMs = load.longestSince(sinceMs);
        const waitedMs = waits.ms;
        const waited = `${waitedMs.toFixed(0)} ms of waiting for a CPU`;
        report(`${name} ${signal}: the longest answer took ${longestMs.toFixed(0)} ms, ${waited}`);
        expect.soft(longestMs, `${name} ${signal}, ${waited}`).toBeLessThan(recoveryMs + usualMs + waitedMs);
      }
    }
    const split = answers.filter(({ handOff }) => handOff.startsWith('split '));
    report(`${cluster.what}: ${answers.length} answers, ${split.length} of them split`);
    if (cluster.size.prefill !== undefined) expect(split.length).toBeGreaterThan(answers.length / 4);
  } finally {
    await load.stop();
  }
  const all = everybody(started);
  for (const signal of ['SIGKILL', 'SIGSTOP'] as const) {
    for (const [name, service] of started.members) {
      if (!isChosen(name)) continue;
      const last = loaded();
      await Promise.race([pause(1_000), last.ended]);
      const waits = new CpuWaits(() => started.stages);
      const diedMs = performance.now();
      await service.signal(signal);
      await last.stop();
      const [kind, number] = [name.slice(0, name.lastIndexOf('-')), Number(name.slice(name.lastIndexOf('-') + 1))];
      const others = (its: string, members: readonly number[]): number[] =>
        members.filter((one) => kind !== its || one !== number);
      const survivors = {
        workers: others('worker', all.workers),
        // What an engine that stands still may read on when it goes on, its node does not give to others; of one that is dead all is free.
        nodes: others(signal === 'SIGSTOP' && kind === 'worker' ? kind : 'node', all.nodes),
        coordinators: others('coordinator', all.coordinators),
      };
      const untilMs = Math.max(diedMs + leaseMs, performance.now() + restMs);
      let left = await heldNow(started, survivors);
      while (left.length > 0 && performance.now() < untilMs + waits.ms) {
        await pause(10);
        left = await heldNow(started, survivors);
      }
      report(
        `${name} ${signal}: nothing is held ${(performance.now() - diedMs).toFixed(0)} ms later ${left.join(', ')}`,
      );
      expect.soft(left, `held after ${name} has got ${signal}`).toEqual([]);
      await (signal === 'SIGKILL' ? service.start() : service.signal('SIGCONT'));
      await expect.poll(() => heldNow(started, all), { timeout: 20_000 }).toEqual([]);
    }
  }
});

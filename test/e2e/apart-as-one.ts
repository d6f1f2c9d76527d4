/**
 * Prefill and decode apart are one: what 1 + 1 and 2 + 2 workers answer, each beside a node of its own and every prompt handed over,
 * equals token by token what one worker without a tier answers, greedy and with seeds, while workers are killed at random; no request
 * fails. KVTIER_CLUSTER_REPORT=1 says what was seen; other deaths with KVTIER_CLUSTER_SEED.
 */
import { afterEach, beforeAll, expect, it } from 'vitest';
import { answersAlone, askAll } from './cluster-load.ts';
import { type Answer, ClusterRig, sharedPrompts } from './cluster-rig.ts';

const clients = 6;
const report = (line: string): void => {
  if (process.env.KVTIER_CLUSTER_REPORT) process.stderr.write(`${line}\n`);
};

/** After every 40 answers kills a worker at random and starts it again, one at a time, until `ended` is. */
async function killAtRandom(cluster: ClusterRig, answers: readonly Answer[], ended: () => boolean): Promise<number[]> {
  const killed: number[] = [];
  let state = Number(process.env.KVTIER_CLUSTER_SEED ?? 54_321);
  while (!ended()) {
    const begun = Object.keys(answers).length;
    while (!ended() && Object.keys(answers).length < begun + 40) await new Promise((resolve) => setTimeout(resolve, 5));
    if (ended()) break;
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    const at = (state >>> 16) % cluster.workers.length;
    await cluster.workers[at]!.signal('SIGKILL');
    await cluster.workers[at]!.start();
    killed.push(at);
  }
  return killed;
}

/** Tests: so many requests of so many prefill and as many decode workers. */
export function answerAsOne(count: number, pairs: readonly number[]): void {
  /** Each table is asked of three times: the first time nobody holds it, then a decode worker may hold most of it. */
  const requests = sharedPrompts(count, Math.ceil(count / 3), 16);
  let right: readonly (readonly number[])[] = [];
  let rig: ClusterRig | undefined;
  afterEach(async () => {
    await rig?.close();
    rig = undefined;
  });

  beforeAll(async () => {
    right = await answersAlone(requests, clients);
  }, 300_000);

  it.each(pairs)(
    '%i prefill and as many decode workers answer as one, whoever is killed',
    {
      timeout: 900_000,
    },
    async (each) => {
      const size = { workers: 2 * each, prefill: each, nodes: 2 * each, coordinators: 1 };
      rig = await ClusterRig.start({ ...size, handoff: { split: 'always' } });
      let done = false;
      const answers: Answer[] = [];
      const killing = killAtRandom(rig, answers, () => done);
      killing.catch(() => {}); // awaited below
      const begin = performance.now();
      try {
        await askAll(rig, requests, clients, answers);
        const seconds = (performance.now() - begin) / 1000;
        done = true;
        const killed = await killing;
        const other = answers.flatMap(({ tokenIds }, i) => (tokenIds.join() === right[i]!.join() ? [] : [i]));
        const why = new Map<string, number>();
        for (const { handOff } of answers) {
          const reason = /why=([^;]*)/.exec(handOff)?.[1] ?? 'nothing';
          why.set(reason, (why.get(reason) ?? 0) + 1);
        }
        const split = answers.filter(({ handOff }) => handOff.startsWith('split ')).length;
        const short = answers.map(({ degraded }) => degraded).filter((degraded) => degraded.includes('handoff-'));
        report(
          `${each} + ${each}: ${answers.length} requests in ${seconds.toFixed(1)} s, ${split} split, ${short.length} fell short ` +
            `(${[...new Set(short)].join('; ')}), decided ${[...why].join(' ')}; workers killed ${killed.join(' ')}, other answers: ${other.join(' ')}`,
        );
        expect(other).toEqual([]);
        expect(answers.flatMap(({ failures }) => failures)).toEqual([]);
        expect(killed.length).toBeGreaterThan(0);
        // The rest came while a role had nobody, or found its prompt held.
        expect(split).toBeGreaterThan(count / 10);
        const fellShort = answers.filter(
          ({ handOff, degraded }) => handOff.startsWith('split ') && degraded !== '',
        ).length;
        expect(split - fellShort).toBeGreaterThan(count / 20);
      } finally {
        done = true;
        await killing.catch(() => {});
      }
    },
  );
}

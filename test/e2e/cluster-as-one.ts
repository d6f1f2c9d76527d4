/**
 * Many engines are one: what 2 and 4 workers that share answer equals, token by token, what one worker without a tier answers, greedy
 * and with seeds, while workers, nodes and coordinators are killed in turn, any of them; no request fails: what a client has to ask again
 * it was denied by a coordinator that was dead at that moment. KVTIER_CLUSTER_REPORT=1 says what was seen; other deaths with
 * KVTIER_CLUSTER_SEED.
 */
import { afterEach, beforeAll, expect, it } from 'vitest';
import { answersAlone, askAll } from './cluster-load.ts';
import { ClusterRig, sharedPrompts } from './cluster-rig.ts';

const clients = 4;
const report = (line: string): void => {
  if (process.env.KVTIER_CLUSTER_REPORT) process.stderr.write(`${line}\n`);
};

const kinds = ['worker', 'node', 'coordinator'] as const;
const kindOf = (name: string): string => name.slice(0, name.lastIndexOf('-'));

/** Blocks that a node had from another one, as it counts in this life. */
const cameFromPeers = async (cluster: ClusterRig, node: number): Promise<number> =>
  (await cluster.nodeCounters(node)).get('load.blocks.from.peer') ?? 0;

/** Kills one of each kind in turn, at random, and starts it again, one at a time, until `ended` is. */
async function killInTurn(cluster: ClusterRig, ended: () => boolean): Promise<{ killed: string[]; shared: number }> {
  const killed: string[] = [];
  let shared = 0;
  let state = Number(process.env.KVTIER_CLUSTER_SEED ?? 12_345);
  while (!ended()) {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    const kind = kinds[killed.length % kinds.length]!;
    const members = [...cluster.members].filter(([name]) => kindOf(name) === kind);
    const at = (state >>> 16) % members.length;
    const [name, service] = members[at]!;
    if (kind === 'node') shared += await cameFromPeers(cluster, at);
    await service.signal('SIGKILL');
    await service.start();
    killed.push(name);
  }
  for (const at of cluster.nodes.keys()) shared += await cameFromPeers(cluster, at);
  return { killed, shared };
}

/** -1: none. */
function firstDifference(a: readonly number[], b: readonly number[]): number {
  const at = a.findIndex((id, i) => id !== b[i]);
  return at === -1 && a.length !== b.length ? a.length : at;
}

/** What has to have come about meanwhile: members that were killed, and blocks that nodes had from each other. */
export interface AtLeast {
  readonly killed: number;
  readonly shared: number;
}

/** Tests: so many requests of so many workers, over two nodes and two coordinators. */
export function answerAsOne(
  count: number,
  sizes: readonly { readonly workers: number; readonly nodes: number }[],
  least: AtLeast,
): void {
  const requests = sharedPrompts(count, 10);
  let right: readonly (readonly number[])[] = [];
  let rig: ClusterRig | undefined;
  afterEach(async () => {
    await rig?.close();
    rig = undefined;
  });

  beforeAll(async () => {
    right = await answersAlone(requests, clients);
  }, 600_000);

  it.each(sizes)(
    '$workers workers over $nodes nodes answer as one, whoever is killed',
    { timeout: 900_000 },
    async (size) => {
      // Nobody stands still here, so no client has a reason to leave because of silence.
      rig = await ClusterRig.start({ ...size, coordinators: 2, silentMs: 60_000 });
      let done = false;
      const killing = killInTurn(rig, () => done);
      killing.catch(() => {}); // awaited below
      const begin = performance.now();
      try {
        const answers = await askAll(rig, requests, clients);
        const seconds = (performance.now() - begin) / 1000;
        const other = answers.flatMap(({ tokenIds }, i) => {
          const at = firstDifference(tokenIds, right[i]!);
          return at === -1 ? [] : [{ i, at }];
        });
        const turned = answers.reduce((sum, answer) => sum + answer.turnedAway, 0);
        done = true;
        const { killed, shared } = await killing;
        const longest = Math.max(...answers.map(({ startMs, endMs }) => endMs - startMs));
        report(
          `${size.workers} workers: ${answers.length} requests, ${other.length} with other tokens, in ${seconds.toFixed(1)} s, ${killed.length} killed (${killed.join(' ')}), ` +
            `${turned} times the other coordinator, longest ${longest.toFixed(0)} ms, ${shared} blocks or more from peers`,
        );
        const failures = answers.flatMap((answer) => answer.failures);
        for (const failure of failures) report(failure);
        expect(failures).toEqual([]);
        expect(killed.length).toBeGreaterThanOrEqual(least.killed);
        expect(shared).toBeGreaterThanOrEqual(least.shared);
        expect(other).toEqual([]);
      } finally {
        done = true;
        await killing.catch(() => {});
      }
    },
  );
}

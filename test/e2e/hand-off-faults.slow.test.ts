/**
 * Hand-offs that end otherwise than they began, between real processes: the client leaves at any point; who holds the hand-off stands
 * still; the prefill worker dies under the decode worker. Every answer is right, and nothing is left of it at either side: no request,
 * no block, no pinned slot, no awaited block.
 */
import { afterAll, beforeAll, expect, it } from 'vitest';
import { everybody, heldAt } from './cluster-held.ts';
import { ClusterRig, type Request, sharedPrompts } from './cluster-rig.ts';
import { CpuWaits } from './cpu-waits.ts';

/** A client that leaves frees all of it within so long. */
const freeMs = 1_000;
/** Whatever was promised is gone so long after its owner. */
const leaseMs = 2_000;
const requests = sharedPrompts(60, 60, 90);
let rig: ClusterRig;
let right: ReadonlyMap<Request, readonly number[]>;
let next = 0;

beforeAll(async () => {
  const alone = await ClusterRig.start({ workers: 1, nodes: 0, coordinators: 1 });
  try {
    const answers = requests
      .slice(0, 36)
      .map(async (request) => [request, (await alone.ask(request)).tokenIds] as const);
    right = new Map(await Promise.all(answers));
  } finally {
    await alone.close();
  }
  rig = await ClusterRig.start({
    ...{ workers: 2, prefill: 1, nodes: 2, coordinators: 2 },
    handoff: { split: 'always', stallMs: 500 },
    // Nobody is asked while it stands still, so no client has a reason to leave because of silence.
    silentMs: 60_000,
  });
}, 200_000);
afterAll(() => rig?.close());

/** One that was not asked yet, whose answer is known. */
const known = (): Request => requests[next++]!;

async function isRight(request: Request): Promise<string> {
  const answer = await rig.ask(request);
  expect(answer.tokenIds).toEqual(right.get(request));
  expect(answer.failures).toEqual([]);
  return answer.degraded;
}

/** A moment's standstill of any process ends a hand-off rightly: of three requests one has to be served as it was meant. */
async function splits(): Promise<void> {
  const said: string[] = [];
  do said.push(await isRight(known()));
  while (said.at(-1)!.includes('handoff') && said.length < 3);
  expect(said.at(-1)).not.toContain('handoff');
}

const cpuWaits = (): CpuWaits => new CpuWaits(() => rig.stages);

/** A look that begins so late, beyond what a busy machine keeps the processes waiting for a CPU, finds nothing. */
async function nothingHeldWithin(
  ms: number,
  what: string,
  coordinators = everybody(rig).coordinators,
  since = { ms: performance.now(), waits: cpuWaits() },
): Promise<void> {
  const asked = { ...everybody(rig), coordinators };
  for (;;) {
    // A look is some connections one after the other.
    const beginMs = performance.now() - since.ms - since.waits.ms;
    const left = await heldAt(rig, asked);
    if (left.length === 0) return;
    expect(beginMs, `${what}: ${left.join(', ')}`).toBeLessThan(ms);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

it('a client that leaves at any point of the hand-off leaves nothing behind', { timeout: 120_000 }, async () => {
  for (let i = 0; i < 3; i++) await isRight(known()); // code is compiled
  const begin = performance.now();
  await isRight(known());
  const wholeMs = performance.now() - begin;
  for (let i = 0; i < 12; i++) {
    const leave = new AbortController();
    const asked = rig.ask(requests[36 + i]!, leave.signal).catch(() => {});
    await new Promise((resolve) => setTimeout(resolve, (wholeMs * i) / 10));
    leave.abort();
    await asked;
    await nothingHeldWithin(freeMs, `left after ${((wholeMs * i) / 10).toFixed(0)} of ${wholeMs.toFixed(0)} ms`);
  }
  await splits();
});

async function until(what: string, condition: () => Promise<boolean>, limitMs = 10_000): Promise<void> {
  const begin = performance.now();
  while (!(await condition())) {
    expect(performance.now() - begin, what).toBeLessThan(limitMs);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

const decodeWaits = (): Promise<void> =>
  until('the decode worker waits', async () => (await rig.workerMetrics(1)).get('kvtier_engine_awaiting') === 1);
const prefillIsReady = async (): Promise<void> => {
  for (const coordinator of [0, 1])
    await until('the prefill worker is back', async () => {
      const metrics = await rig.metrics(coordinator);
      return metrics.get('kvtier_worker_state{worker="worker-0",state="ready"}') === 1;
    });
};

it('the prefill worker is killed under a decode worker that waits, and is back', { timeout: 120_000 }, async () => {
  const [prefill] = rig.workers;
  await prefill!.signal('SIGSTOP'); // so that the decode worker waits
  const request = known();
  const asked = rig.ask(request);
  asked.catch(() => {}); // awaited below
  await decodeWaits();
  const [atMs, waits] = [performance.now(), cpuWaits()];
  await prefill!.signal('SIGKILL');
  const answer = await asked;
  expect(answer.tokenIds).toEqual(right.get(request));
  expect(answer.endMs - atMs - waits.ms).toBeLessThan(leaseMs);
  await prefill!.start();
  await prefillIsReady();
  await splits();
  await nothingHeldWithin(leaseMs, 'after the prefill worker has died');
});

it('what a coordinator had promised ends when it stands still, and when it is killed', {
  timeout: 120_000,
}, async () => {
  const [prefill] = rig.workers;
  for (const signal of ['SIGSTOP', 'SIGKILL'] as const) {
    await prefill!.signal('SIGSTOP');
    const leave = new AbortController();
    const asked = rig.ask(known(), leave.signal).catch(() => {});
    await decodeWaits();
    const owner = await ownerOf();
    await rig.coordinators[owner]!.signal(signal);
    const since = { ms: performance.now(), waits: cpuWaits() };
    leave.abort(); // which a coordinator that stands still does not hear
    await asked;
    await prefill!.signal('SIGCONT');
    await nothingHeldWithin(leaseMs, `${signal} of the coordinator`, [1 - owner], since);
    if (signal === 'SIGSTOP') await rig.coordinators[owner]!.signal('SIGCONT');
    else await rig.coordinators[owner]!.start();
    await prefillIsReady();
    await splits();
  }
});

/** Which coordinator has the hand-off. */
async function ownerOf(): Promise<number> {
  const legs = (await rig.metrics(0)).get('kvtier_handoff_legs');
  return legs === 0 ? 1 : 0;
}

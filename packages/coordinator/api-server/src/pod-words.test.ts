/** Pods that answer 500: another one may do better, and where none does the last one's words are the answer. */
import { Pod, type PodRequest } from '@kvtier/registry/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const pods = ['one', 'two'].map((name) => ({ name, pod: Object.assign(new Pod(), { model: 'pods' }) }));
const [one, two] = pods.map(({ pod }) => pod) as [Pod, Pod];
beforeEach(async () => {
  for (const { pod } of pods) {
    pod.seen.length = 0;
    await pod.start();
  }
});
afterEach(async () => {
  for (const { pod } of pods) await pod.stop();
});
/** The server knows so many, and the first one is nearest. */
async function known(count: number): Promise<void> {
  await at.workers(
    ...pods.slice(0, count).map(({ name, pod }) => ({ name, kind: 'openai' as const, address: pod.address })),
  );
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  at.holdings.blocks.length = 0;
  at.holdings.blocks[at.fleet.workers().find((worker) => worker?.record.name === 'one')!.number] = 1;
}
const ask = (init: RequestInit = {}): Promise<Response> =>
  at.post('/v1/completions', { model: 'pods', prompt: 'a'.repeat(600) }, init);
const atRest = (): Promise<unknown> => vi.waitUntil(() => at.dispatcher.stats().given === 0, patience);
const answers =
  (status: number, text: string, headers: object = { 'content-type': 'application/problem+json' }) =>
  ({ response }: PodRequest): void =>
    void response.writeHead(status, { ...headers }).end(text);
const seen = (): number[] => pods.map(({ pod }) => pod.seen.length);

it.each([1, 2])('of %d that all answer 500, each is asked once', async (count) => {
  await known(count);
  one.answer = answers(500, '{"error": {"message":  "one"}}');
  two.answer = answers(500, '{"error": {"message":  "two"}}');
  const response = await ask();
  const header = (name: string): string | null => response.headers.get(name);
  expect([response.status, await response.text()]).toEqual([
    500,
    `{"error": {"message":  "${pods[count - 1]!.name}"}}`,
  ]);
  expect([
    header('content-type'),
    header('x-kvtier-worker'),
    header('x-kvtier-retries'),
    header('retry-after'),
  ]).toEqual(['application/problem+json', pods[count - 1]!.name, count === 1 ? null : '1', null]);
  expect(seen()).toEqual([1, count - 1]);
  await atRest();
  expect(await at.metricsText()).toContain('kvtier_requests_total{route="/v1/completions",status="500"} 1\n');
});

it('no more than 64 KiB of its words are kept', async () => {
  await known(1);
  one.answer = answers(500, 'a'.repeat(100_000));
  const response = await ask();
  expect([response.status, await response.text()]).toEqual([500, 'a'.repeat(65_536)]);
  await atRest();
});

it('who never ends what it says is not waited for', async () => {
  await known(1);
  one.answer = ({ response }) => void response.writeHead(500, { 'content-type': 'text/plain' }).write('some');
  const response = await ask({ signal: AbortSignal.timeout(10_000) });
  expect([response.status, await response.text(), one.seen.length]).toEqual([500, 'some', 1]);
  await one.seen[0]!.left;
  await atRest();
});

it('who says nothing more is told in our words', async () => {
  await known(1);
  one.answer = answers(500, '');
  const response = await ask();
  expect([response.status, await response.json(), one.seen.length]).toEqual([
    500,
    {
      error: {
        message: 'worker one: answers 500; try again, or look into its log.',
        type: 'server_error',
        param: null,
        code: 'engine_failed',
      },
    },
    1,
  ]);
  await atRest();
});

it.each<[string, (request: PodRequest) => void]>([
  ['answers 503', answers(503, '{}')],
  ['hangs up', ({ response }) => void response.socket!.destroy()],
])('beside one that %s it is asked again: that one may be back', async (_, fails) => {
  await known(2);
  let failed = 0;
  one.answer = answers(500, '{"error":"one"}');
  two.answer = (request) => (failed++ === 0 ? fails(request) : answers(200, '{"ok":1}')(request));
  const response = await ask();
  expect([response.status, await response.text()]).toEqual([200, '{"ok":1}']);
  expect(two.seen).toHaveLength(2);
  await atRest();
});

it('503 is tried again while there is time', async () => {
  await at.open({ limits: { tries: 3 } });
  await known(1);
  one.answer = answers(503, '{"error":"loading"}');
  const response = await ask();
  expect([response.status, response.headers.get('retry-after'), one.seen.length]).toEqual([503, '1', 3]);
  await atRest();
});

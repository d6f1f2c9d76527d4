/** Pods that answer 500: another one may do better, and where none does the last one's words are the answer. */
import { setImmediate } from 'node:timers/promises';
import { Pod, type PodRequest } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, onTestFinished, vi } from 'vitest';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const pods = ['one', 'two'].map((name) => ({ name, pod: Object.assign(new Pod(), { model: 'pods' }) }));
const [one, two] = pods.map(({ pod }) => pod) as [Pod, Pod];
beforeEach(async () => {
  for (const { pod } of pods) {
    Object.assign(pod, { healthy: true, models: undefined });
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
  const metrics = await at.metricsText();
  expect(metrics).toContain('kvtier_requests_total{route="/v1/completions",status="500"} 1\n');
  const retries = /^kvtier_request_retries_total.*$/m.exec(metrics)?.[0];
  expect(retries).toBe(count === 1 ? undefined : 'kvtier_request_retries_total{code="DISCONNECTED"} 1');
});

it('the log has one line of it', async () => {
  const logger = createLogger('pod-words-test', 'silent');
  const warn = vi.spyOn(logger, 'warn');
  await at.open({ logger });
  await known(1);
  for (const text of ['{"error":{"message":"EngineCore died"}}', 'EngineCore died']) {
    one.answer = answers(500, text);
    expect((await ask({ headers: { 'content-type': 'application/json', 'x-request-id': 'r-1' } })).status).toBe(500);
    await atRest();
    const expected = [[{ request: 'r-1' }, 'worker one: answers 500: EngineCore died']];
    await vi.waitFor(() => expect(warn.mock.calls).toEqual(expected), patience);
    warn.mockClear();
  }
});

const inOurShape = (words: string): object => ({
  error: { message: `worker one: answers 500: ${words}`, type: 'server_error', param: null, code: 'engine_failed' },
});
it.each([
  ['text', 'Internal Server Error', 'Internal Server Error'],
  ["SGLang's object", '{"object":"error","message":"it died","type":"InternalServerError","code":500}', 'it died'],
  ["FastAPI's detail", '{"detail":"it died"}', 'it died'],
  ['no object', '["it died"]', '["it died"]'],
  ['an object of another form', '{"error":null}', '{"error":null}'],
  ['much text', 'a'.repeat(100_000), 'a'.repeat(2_000)],
  [
    'more than 64 KiB of an object',
    `{"error":{"message":"${'a'.repeat(100_000)}"}}`,
    `{"error":{"message":"${'a'.repeat(1_979)}`,
  ],
])('what no client would read is told in a form that all read: %s', async (_, text, words) => {
  await known(1);
  one.answer = answers(500, text, { 'content-type': 'text/html' });
  const response = await ask();
  const header = (name: string): string | null => response.headers.get(name);
  expect([response.status, header('x-kvtier-worker'), await response.json()]).toEqual([500, 'one', inOurShape(words)]);
  expect(header('content-type')).toMatch(/^application\/json/);
  await atRest();
});

it.each(['{"error":"it died"}', `{"error":{"message":"${'a'.repeat(60_000)}","code":500}}`])(
  'what clients read goes on as it came (%#)',
  async (text) => {
    await known(1);
    one.answer = answers(500, text);
    const response = await ask();
    expect([response.status, await response.text()]).toEqual([500, text]);
    await atRest();
  },
);

it('who never ends what it says is not waited for', async () => {
  await known(1);
  one.answer = ({ response }) => void response.writeHead(500, { 'content-type': 'text/plain' }).write('some');
  const response = await ask({ signal: AbortSignal.timeout(10_000) });
  expect([response.status, await response.json(), one.seen.length]).toEqual([500, inOurShape('some'), 1]);
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

const states = (): (string | undefined)[] =>
  ['one', 'two'].map((name) => at.fleet.workers().find((worker) => worker?.record.name === name)?.state);
const areSilent = (...names: ('one' | 'two')[]): Promise<unknown> =>
  vi.waitUntil(() => names.every((name) => states()[name === 'one' ? 0 : 1] === 'silent'), patience);

it('one that is away and expected is waited for, and no other is asked again', async () => {
  await at.open({ limits: { absentMs: 20_000, retryMs: 20_000 } });
  await known(2);
  await two.stop();
  await areSilent('two');
  one.answer = answers(500, '{"error":"one"}');
  two.answer = answers(200, '{"ok":1}');
  const asked = ask();
  await vi.waitUntil(() => one.seen.length === 1, patience);
  await two.start();
  const response = await asked;
  expect([response.status, await response.text(), seen()]).toEqual([200, '{"ok":1}', [1, 1]]);
  await atRest();
});

it('and when it is expected no more, the answer is what the others said', async () => {
  await at.open({ limits: { absentMs: 1_500 } });
  await known(2);
  await two.stop();
  await areSilent('two');
  one.answer = answers(500, '{"error":"one"}');
  const response = await ask();
  expect([response.status, await response.text(), seen()]).toEqual([500, '{"error":"one"}', [1, 0]]);
  await atRest();
});

/** `asked` is waited for; it settles long before anybody is expected no more. */
const atOnce = async (asked: Promise<Response>): Promise<readonly unknown[]> => {
  const beganMs = performance.now();
  const response = await asked;
  return [response.status, await response.text(), performance.now() - beganMs < 10_000];
};

it('one that goes away with its request is not waited for: it has been asked', async () => {
  await at.open({ limits: { absentMs: 20_000, retryMs: 20_000 } });
  await known(1);
  one.answer = () => {};
  const asked = ask();
  await vi.waitUntil(() => one.seen.length === 1, patience);
  one.healthy = false;
  at.fleet.doubted(at.fleet.workers().find((worker) => worker?.record.name === 'one')!.number);
  await areSilent('one');
  answers(500, '{"error":"one"}')(one.seen[0]!);
  expect(await atOnce(asked)).toEqual([500, '{"error":"one"}', true]);
  expect(seen()).toEqual([1, 0]);
  await atRest();
});

it('nor is one of which nobody knows what it serves', async () => {
  await at.open({ limits: { absentMs: 20_000, retryMs: 20_000 } });
  await known(1);
  await two.stop();
  at.discovery.say(...pods.map(({ name, pod }) => ({ name, kind: 'openai' as const, address: pod.address })));
  await vi.waitUntil(() => states()[1] === 'joining', patience);
  one.answer = answers(500, '{"error":"one"}');
  expect(await atOnce(ask())).toEqual([500, '{"error":"one"}', true]);
  await atRest();
});

it('nor one that lacks the adapter which is asked for', async () => {
  await at.open({ limits: { absentMs: 20_000, retryMs: 20_000 } });
  const cards = [{ id: 'pods' }, { id: 'tuned', parent: 'pods' }];
  one.models = () => JSON.stringify({ object: 'list', data: cards });
  await known(2);
  one.models = undefined;
  await two.stop();
  await areSilent('two');
  one.answer = answers(500, '{"error":"one"}');
  const asked = at.post('/v1/completions', { model: 'tuned', prompt: 'a'.repeat(600) });
  expect(await atOnce(asked)).toEqual([500, '{"error":"one"}', true]);
  await atRest();
});

/** `one` decodes and answers 500, `two` has this role and is away. */
async function besideAway(role: 'prefill' | 'decode', ...more: Parameters<typeof at.discovery.say>): Promise<void> {
  const its = (name: string, pod: Pod) => ({ name, kind: 'openai' as const, address: pod.address });
  await at.open({ limits: { absentMs: 20_000, retryMs: 20_000 } });
  await at.workers({ ...its('one', one), role: 'decode' }, { ...its('two', two), role }, ...more);
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  await two.stop();
  await areSilent('two');
  one.answer = answers(500, '{"error":"one"}');
}

it('nor one that only computes prompts for others', async () => {
  await besideAway('prefill');
  expect(await atOnce(ask())).toEqual([500, '{"error":"one"}', true]);
  expect(seen()).toEqual([1, 0]);
  await atRest();
});

it('beside one that is ready and not to be chosen, a crowd is tried anew once for each change of who is ready', async () => {
  const prefill = Object.assign(new Pod(), { model: 'pods' });
  await prefill.start();
  onTestFinished(() => prefill.stop());
  const named = { name: 'prefill', kind: 'openai' as const, address: prefill.address, role: 'prefill' as const };
  await besideAway('decode', named);
  two.answer = answers(200, '{"ok":1}');
  const choose = vi.spyOn(at.dispatcher, 'choose');
  const count = 100;
  const asked = Array.from({ length: count }, async () => {
    const response = await ask();
    return [response.status, await response.text()];
  });
  const areWaiting = async (): Promise<boolean> =>
    (await at.metricsText()).includes(`\nkvtier_requests_expecting ${count}\n`);
  await vi.waitUntil(areWaiting, patience);
  const said = at.fleet.workers().flatMap((worker) => worker?.record ?? []);
  /** Choices after this change, once those that follow it have been made. */
  const chosenAfter = async (...records: typeof said): Promise<number> => {
    choose.mockClear();
    at.discovery.say(...records);
    for (let turn = 0; turn < 200; turn++) await setImmediate();
    return choose.mock.calls.length;
  };
  const draining = said.map((record) => ({ ...record, draining: record.name === 'prefill' }));
  expect(await chosenAfter(...said)).toBe(0);
  expect(await chosenAfter(...draining)).toBe(count);
  expect(await chosenAfter(...said)).toBe(count);
  await two.start();
  expect(await Promise.all(asked)).toEqual(Array.from({ length: count }, () => [200, '{"ok":1}']));
  expect([...seen(), prefill.seen.length]).toEqual([count, count, 0]);
  await atRest();
});

it('who waits for another one is counted, and not beyond the time for its first token', async () => {
  await at.open({ limits: { absentMs: 20_000, retryMs: 20_000 } });
  await known(2);
  await two.stop();
  await areSilent('two');
  one.answer = answers(500, '{"error":"one"}');
  const expecting = async (): Promise<string> => /^kvtier_requests_expecting (\d+)$/m.exec(await at.metricsText())![1]!;
  const left = new AbortController();
  const gone = ask({ signal: left.signal });
  await vi.waitUntil(async () => (await expecting()) === '1', patience);
  left.abort();
  await expect(gone).rejects.toThrow();
  await vi.waitUntil(async () => (await expecting()) === '0', patience);
  const headers = { 'content-type': 'application/json', 'x-slo-ttft-ms': '1500' };
  expect(await atOnce(ask({ headers }))).toEqual([500, '{"error":"one"}', true]);
  expect(seen()).toEqual([2, 0]);
  await atRest();
});

const unavailable = (message: string): object => ({
  error: { message, type: 'server_error', param: null, code: 'engine_unavailable' },
});
/** The request of one that answers 500 and of another that hangs up waits: both are gone. */
const askedInVain = async (limits: object, text: string): Promise<{ readonly asked: Promise<Response> }> => {
  await at.open({ limits: { tries: 1_000, closeGraceMs: 0, ...limits } });
  await known(2);
  one.answer = answers(500, text);
  two.answer = ({ response }) => {
    response.socket!.destroy();
    for (const { pod } of pods) void pod.stop();
  };
  const asked = ask();
  await areSilent('one', 'two');
  return { asked };
};

it('an old 500 is not the answer where another pod failed after it', async () => {
  const { asked } = await askedInVain({ retryMs: 2_000 }, '{"error":"one"}');
  const response = await asked;
  expect([response.status, response.headers.get('retry-after'), await response.json()]).toEqual([
    503,
    '1',
    unavailable(expect.stringMatching(/^worker (one|two): /) as unknown as string),
  ]);
  await atRest();
});

it('nor is one that comes last, behind other failures', async () => {
  await at.open({ limits: { tries: 2 } });
  await known(2);
  one.answer = ({ response }) => void response.socket!.destroy();
  two.answer = answers(500, '{"error":"two"}');
  const response = await ask();
  expect([response.status, response.headers.get('retry-after'), await response.json()]).toEqual([
    503,
    '1',
    unavailable('worker two: answers 500; try again'),
  ]);
  await atRest();
});

it('nor is one when the server closes', async () => {
  const { asked } = await askedInVain({ retryMs: 60_000 }, '');
  const [response] = await Promise.all([asked, at.server.close()]);
  expect([response.status, await response.json()]).toEqual([503, unavailable('the API server is closing; try again')]);
});

it('503 is tried again while there is time', async () => {
  await at.open({ limits: { tries: 3 } });
  await known(1);
  one.answer = answers(503, '{"error":"loading"}');
  const response = await ask();
  expect([response.status, response.headers.get('retry-after'), one.seen.length]).toEqual([503, '1', 3]);
  await atRest();
});

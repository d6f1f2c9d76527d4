/** Pods that answer their metrics while their requests fail: those that say that they are not well, and those that do not. */
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Fleet } from './fleet.ts';
import { leave } from './pod-requests.ts';
import { Pod } from './testing/pod.ts';
import { SpokenDiscovery } from './testing/rig.ts';
import type { Worker } from './worker.ts';

const patience = { timeout: 20_000, interval: 5 };
const never = new AbortController().signal;

let fleet: Fleet;
let pods: Pod[];
beforeEach(async () => {
  pods = [new Pod(), new Pod()];
  for (const pod of pods) await pod.start();
  // Limits that no busy machine reaches.
  const times = { scrapeMs: 20, askMs: 5_000, podSilentMs: 5_000 };
  fleet = new Fleet({ logger: createLogger('pod-failing-test', 'silent'), times });
  const discovery = new SpokenDiscovery();
  await fleet.start(discovery);
  discovery.say(...pods.map(({ address }, at) => ({ name: `p${at}`, kind: 'openai' as const, address })));
  for (const at of pods.keys()) await until('ready', at);
});
afterEach(async () => {
  vi.useRealTimers();
  await fleet.close();
  for (const pod of pods) await pod.stop();
});

const worker = (at = 0): Worker => fleet.workers()[at]!;
const until = (state: string, at = 0): Promise<void> =>
  vi.waitFor(() => expect(worker(at).state).toBe(state), patience);
/** Scrapes that began after now have been heard. */
const scraped = async (at = 0): Promise<void> => {
  const after = pods[at]!.scrapes + 3; // the one before the last has been heard
  await vi.waitFor(() => expect(pods[at]!.scrapes).toBeGreaterThanOrEqual(after), patience);
};
const answering = (status: number, at = 0): void => {
  pods[at]!.answer = ({ response }) => void response.writeHead(status).end('{}');
};
const error = (code: number): string => `data: {"error":{"message":"EngineCore died","code":${code}}}\n\n`;
const role = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n';
const token = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n';
/** Status 200, and these events. */
const streaming = (text: string, at = 0): void => {
  pods[at]!.answer = ({ response }) =>
    void response.writeHead(200, { 'content-type': 'text/event-stream' }).end(`${text}data: [DONE]\n\n`);
};
/** From now on the clock goes by the test's looks alone, 5 ms each: no rest ends because a machine stands still. */
const stopClock = (): void => void vi.useFakeTimers({ toFake: ['performance'] });
/** The status of its answer; undefined: it broke. */
const ask = async (at = 0): Promise<number | undefined> => {
  try {
    const answer = await fleet.forward(at, '/v1/completions', {}, '{}', never);
    for await (const _ of answer.body);
    return answer.status;
  } catch {
    return undefined;
  }
};

it.each<[string, (pod: Pod) => void]>([
  ['answers 500', () => answering(500)],
  [
    'breaks',
    (pod) => {
      pod.answer = ({ response }) => void response.destroy();
    },
  ],
])('a request that %s: the pod is asked whether it is well, and gets nothing until it says so', async (_, fails) => {
  fails(pods[0]!);
  pods[0]!.healthy = false;
  await scraped();
  expect(worker().state).toBe('ready'); // as far as anybody knows
  await ask();
  await until('silent');
  expect(worker().why).toContain('/health answers 503');
  pods[0]!.healthy = true;
  await until('ready');
});

it('one that says that it is well, and fails all the same, rests while another serves, until a request succeeds', async () => {
  stopClock();
  answering(500);
  for (let i = 0; i < 2; i++) await ask();
  await scraped();
  expect(worker().state).toBe('ready');
  await ask();
  expect([worker().state, worker().why]).toEqual([
    'silent',
    'worker p0: 3 requests in a row failed there, the last with "/v1/completions answers 500", and it gets nothing new for 1 s; see its log',
  ]);
  await scraped();
  expect([worker().state, fleet.counts.lost]).toEqual(['silent', 0]);
  vi.advanceTimersByTime(1_000);
  await until('ready');
  // The next one is one alone.
  let answer: (() => void) | undefined;
  pods[0]!.answer = ({ response }) => {
    answer = () => void response.end('{}');
  };
  const tried = ask();
  expect(worker().state).toBe('silent');
  await vi.waitFor(() => expect(answer).toBeDefined(), patience);
  answer!();
  expect(await tried).toBe(200);
  expect([worker().state, worker().why]).toEqual(['ready', undefined]);
});

it.each([
  ['at once', error(500), 500],
  ['behind its role', role + error(500), 500],
  ['behind its role and a line that says nothing', `: ping\n\n${role}${error(503)}`, 503],
])('a stream that fails %s is a request that failed', async (_, text, status) => {
  stopClock();
  streaming(text);
  for (let i = 0; i < 2; i++) expect(await ask()).toBe(status);
  expect(worker().state).toBe('ready');
  expect(await ask()).toBe(status);
  expect([worker().state, worker().why]).toEqual([
    'silent',
    `worker p0: 3 requests in a row failed there, the last with "/v1/completions answers ${status} in its first event", and it gets nothing new for 1 s; see its log`,
  ]);
});

it('so is one that is aborted before its first token, and one that breaks off behind its role', async () => {
  stopClock();
  const aborted = '{"choices":[{"index":0,"text":"","finish_reason":"abort"}]}';
  streaming(`data: ${aborted}\n\n`);
  for (let i = 0; i < 2; i++) expect(await ask()).toBeUndefined();
  expect(worker().state).toBe('ready');
  pods[0]!.answer = ({ response }) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' });
    response.write(role, () => setImmediate(() => response.socket!.destroy()));
  };
  expect(await ask()).toBeUndefined();
  expect(worker().state).toBe('silent');
});

it('a stream is a success with its first token, not before', async () => {
  stopClock();
  answering(500);
  for (let i = 0; i < 2; i++) await ask();
  // The pod has answered with 200 long before.
  pods[0]!.answer = ({ response }) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' });
    response.write(role, () => setImmediate(() => response.end(error(500))));
  };
  expect([await ask(), worker().state]).toEqual([500, 'silent']);
  vi.advanceTimersByTime(1_000);
  await until('ready');
  streaming(role + token);
  expect([await ask(), worker().state, worker().why]).toEqual([200, 'ready', undefined]);
});

it('a stream that refuses its request in its first event says nothing of the pod', async () => {
  stopClock();
  answering(500);
  for (let i = 0; i < 2; i++) await ask();
  streaming(error(400));
  for (let i = 0; i < 3; i++) expect(await ask()).toBe(200);
  expect(worker().state).toBe('ready');
  answering(500);
  await ask();
  expect(worker().state).toBe('silent');
});

it('requests that fail at every pod take none of them out', async () => {
  stopClock();
  for (const at of [0, 1]) answering(500, at);
  for (let i = 0; i < 6; i++) for (const at of [1, 0]) await ask(at);
  for (const at of [0, 1]) await scraped(at);
  expect([worker(0).state, worker(1).state]).toEqual(['ready', 'ready']);
});

it('one that rests is back when the other one fails, too', async () => {
  stopClock();
  answering(500);
  for (let i = 0; i < 3; i++) await ask();
  expect(worker().state).toBe('silent');
  answering(503, 1);
  const fromMs = performance.now();
  await ask(1);
  await until('ready');
  expect(performance.now() - fromMs).toBeLessThan(900);
});

it.each([429, 404])('refusals (%d) say nothing of the pod', async (status) => {
  answering(status);
  pods[0]!.healthy = false;
  for (let i = 0; i < 5; i++) expect(await ask()).toBe(status);
  await scraped();
  expect(worker().state).toBe('ready');
});

it('nor do answers that nobody reads to their end', async () => {
  pods[0]!.answer = ({ response }) => void response.write('some');
  pods[0]!.healthy = false;
  for (let i = 0; i < 5; i++) await leave(await fleet.forward(0, '/v1/completions', {}, '{}', never));
  const { body } = await fleet.forward(0, '/v1/completions', {}, '{}', never);
  const parts = body[Symbol.asyncIterator]();
  await parts.next();
  const waits = parts.next();
  await parts.return?.();
  await waits.catch(() => undefined);
  await scraped();
  expect(worker().state).toBe('ready');
});

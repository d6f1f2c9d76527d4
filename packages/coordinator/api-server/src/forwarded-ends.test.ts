/** How answers of pods end, and what is counted of them: tokens, and whether they were cut. */
import { KvError } from '@kvtier/errors';
import { fail, Pod, type PodRequest, event as written } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const pod = Object.assign(new Pod(), { model: 'pods' });
const route = '/v1/chat/completions';
beforeEach(async () => {
  pod.seen.length = 0;
  await pod.start();
  await at.workers({ name: 'one', kind: 'openai', address: pod.address });
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
});
afterEach(() => pod.stop());

const ask = (part: object = {}, init: RequestInit = {}): Promise<Response> =>
  at.post(route, { model: 'pods', messages: [{ role: 'user', content: 'a' }], ...part }, init);
const event = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n';
const done = 'data: [DONE]\n\n';
const usage =
  '"usage":{"prompt_tokens":50,"completion_tokens":7,"total_tokens":57,"prompt_tokens_details":{"cached_tokens":32}}';
const counted = async (status: number): Promise<unknown> =>
  vi.waitUntil(
    async () => (await at.metricsText()).includes(`kvtier_requests_total{route="${route}",status="${status}"} 1\n`),
    patience,
  );
const tokens = async (): Promise<number[]> => {
  const text = await at.metricsText();
  const figure = (name: string): number => Number(new RegExp(`^kvtier_request_${name} (\\d+)$`, 'm').exec(text)?.[1]);
  return ['prompt_tokens_total', 'completion_tokens_total', 'cached_tokens_total{tier="pod"}'].map((name) =>
    figure(name.replaceAll(/[{}]/g, '\\$&')),
  );
};
/** The pod writes this of a stream, or of a whole answer that is longer, and its connection breaks. */
const dies = (text: string, type = 'text/event-stream') => {
  pod.answer = ({ response }: PodRequest): void => {
    response.writeHead(200, { 'content-type': type }).write(text, () => setImmediate(() => response.socket!.destroy()));
  };
};

describe('a pod that dies in the middle of an answer', () => {
  it('ends a stream that stands between two events with one that says so, and is counted as a failure', async () => {
    dies(event);
    const text = await (await ask({ stream: true })).text();
    expect(text.startsWith(event)).toBe(true);
    expect(JSON.parse(text.slice(event.length).replace(/^data: /, ''))).toEqual({
      error: {
        message: expect.stringMatching(/^worker one: /),
        type: 'server_error',
        param: null,
        code: 'engine_unavailable',
      },
    });
    expect(text.endsWith('\n\n')).toBe(true);
    await counted(502);
  });

  it.each([
    ['a stream in the middle of an event', `${event}data: {"cho`, 'text/event-stream'],
    ['a whole answer', '{"choices":', 'application/json'],
  ])('cuts %s, which is no client that left', async (_, text, type) => {
    dies(text, type);
    await expect((await ask()).text()).rejects.toThrow();
    await counted(502);
  });

  it('behind its last event has answered', async () => {
    dies(`${event}data: {"choices":[],${usage}}\n\n${done}`);
    expect((await (await ask({ stream: true })).text()).endsWith(done)).toBe(true);
    await counted(200);
    expect(await tokens()).toEqual([50, 7, 32]);
  });
});

it('a stream that says itself that it failed is counted so, and goes on as it came', async () => {
  const text = `${event}data: {"error": {"message": "EngineCore died", "code": 500}}\n\n${done}`;
  pod.answer = ({ response }) => void response.writeHead(200, { 'content-type': 'text/event-stream' }).end(text);
  expect(await (await ask({ stream: true })).text()).toBe(text);
  await counted(502);
});

it('a client that leaves is still one, and no trouble', async () => {
  const logger = createLogger('forwarded-ends-test', 'silent');
  const lines: unknown[] = [];
  vi.spyOn(logger, 'warn').mockImplementation((...line: unknown[]) => void lines.push(['warn', ...line]));
  vi.spyOn(logger, 'debug').mockImplementation((...line: unknown[]) => void lines.push(['debug', ...line]));
  await at.open({ logger });
  await at.workers({ name: 'one', kind: 'openai', address: pod.address });
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  pod.answer = ({ response }) => void response.writeHead(200, { 'content-type': 'text/event-stream' }).write(event);
  const abort = new AbortController();
  const response = await ask({ stream: true }, { signal: abort.signal });
  await response.body!.getReader().read();
  abort.abort();
  await counted(499);
  await vi.waitFor(() => expect(lines).not.toHaveLength(0), patience);
  expect(lines).toEqual([['debug', { request: expect.any(String) }, 'answer cut: the client ended the request']]);
});

it('an answer that our own end cuts is told so', async () => {
  await at.open({ limits: { closeGraceMs: 0 } });
  await at.workers({ name: 'one', kind: 'openai', address: pod.address });
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  pod.answer = ({ response }) => void response.writeHead(200, { 'content-type': 'text/event-stream' }).write(event);
  const response = await ask({ stream: true });
  const [text] = await Promise.all([response.text(), at.server.close()]);
  expect(text).toContain('"message":"the API server is closing; try again"');
});

describe('tokens', () => {
  it.each([
    ['of a stream', `${event}data: {"choices":[],${usage}}\n\n${done}`, 'text/event-stream', [50, 7, 32]],
    ['of a whole answer', `{"choices":[],${usage},"kv_transfer_params":null}`, 'application/json', [50, 7, 32]],
    ['of a stream without usage nobody knows', event + done, 'text/event-stream', [0, 0, Number.NaN]],
  ])('%s are counted by its usage', async (_, text, type, expected) => {
    pod.answer = ({ response }) => void response.writeHead(200, { 'content-type': type }).end(text);
    const answers = at.watchAnswers();
    expect(await (await ask({ stream: true })).text()).toBe(text);
    await counted(200);
    expect(await tokens()).toEqual(expected);
    expect(answers).toEqual([expected[1] || undefined]);
  });

  it('of what a pod refuses are none', async () => {
    pod.answer = ({ response }) => void response.writeHead(400).end(`{${usage}}`);
    expect((await ask()).status).toBe(400);
    await counted(400);
    expect(await tokens()).toEqual([0, 0, Number.NaN]);
  });
});

it('a stream of our own workers that fails after it began is counted so, too', async () => {
  await at.open();
  at.engine.script = (call) => {
    call.write(written({ tokenIds: [200] }));
    fail(new KvError('PROTOCOL', 'engine: nonsense'))(call);
  };
  const response = await at.post('/v1/completions', { prompt: [5, 6], max_tokens: 4, stream: true });
  expect(await response.text()).toContain('"error"');
  await vi.waitUntil(async () => /v1\/completions",status="502"} 1\n/.test(await at.metricsText()), patience);
});

/** How answers of pods begin: what is held until it is known that they do, and what is let go then. */
import { once } from 'node:events';
import { type ClientRequest, request as httpRequest } from 'node:http';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { Pod, type PodRequest, say } from '@kvtier/registry/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const route = '/v1/chat/completions';
const [one, two] = [new Pod(), new Pod()].map((pod) => Object.assign(pod, { model: 'pods' })) as [Pod, Pod];
beforeEach(async () => {
  for (const pod of [one, two]) {
    pod.seen.length = 0;
    await pod.start();
  }
});
afterEach(async () => {
  for (const pod of [one, two]) await pod.stop();
});
/** The server knows these, and the first one is nearest. */
async function known(...names: ('one' | 'two')[]): Promise<void> {
  await at.workers(...names.map((name) => ({ name, kind: 'openai' as const, address: { one, two }[name].address })));
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  at.holdings.blocks.length = 0;
  at.holdings.blocks[at.fleet.workers().find((worker) => worker?.record.name === 'one')!.number] = 1;
}

const chat = { model: 'pods', messages: [{ role: 'user', content: 'a'.repeat(600) }] };
const ask = (part: object = {}, init: RequestInit = {}): Promise<Response> =>
  at.post(route, { ...chat, ...part }, init);
const atRest = (): Promise<unknown> => vi.waitUntil(() => at.dispatcher.stats().given === 0, patience);
const role = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n';
const token = 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n';
const done = 'data: [DONE]\n\n';
const streaming =
  (text: string, headers: object = {}) =>
  ({ response }: PodRequest): void =>
    void response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8', ...headers }).end(text);
const firstTokens = async (): Promise<string | undefined> =>
  /time_to_first_token_seconds_count (\d+)/.exec(await at.metricsText())?.[1];

it('a stream is held until its first token, and passes byte by byte', async () => {
  await known('one');
  // One by one, so that whatever is not held has gone on long before the last.
  const pings = Array<string>(200).fill(': ping\r\n\r\n');
  const rest = `${role}\n${token}${token}${done}`;
  let hasBegun = false;
  let hasBegunBefore: boolean | undefined;
  one.answer = ({ response }) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' });
    const pieces = [...pings];
    const next = (): void => {
      const piece = pieces.shift();
      if (piece !== undefined) return void response.write(piece, () => setImmediate(next));
      hasBegunBefore = hasBegun;
      response.end(rest);
    };
    next();
  };
  const response = await ask({ stream: true });
  hasBegun = true;
  expect([hasBegunBefore, await response.text()]).toEqual([false, pings.join('') + rest]);
  await atRest();
  expect(await firstTokens()).toBe('1');
});

it('one that fails first has no first token, and its client is told so by another status', async () => {
  await known('one');
  const error = '{"error":{"message":"Internal server error","type":"InternalServerError","param":null,"code":500}}';
  for (const text of [`data: ${error}\n\n${done}`, `${role}data: ${error}\n\n${done}`]) {
    one.answer = streaming(text);
    const response = await ask({ stream: true });
    expect([response.status, response.headers.get('content-type'), await response.text()]).toEqual([
      500,
      'application/json',
      error,
    ]);
  }
  await atRest();
  expect([one.seen.length, await firstTokens()]).toEqual([2, '0']);
});

it.each([
  ['a full pod', 'data: {"error":{"message":"full","code":429}}\n\n', 429, 'queue_full'],
  ['one that aborts it', 'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\n', 503, 'engine_unavailable'],
])('a stream of %s is tried elsewhere, and told as any of its kind', async (_, text, status, code) => {
  await at.open({ limits: { tries: 2 } });
  await known('one', 'two');
  one.answer = streaming(role + text);
  two.answer = streaming(role + token + done);
  const response = await ask({ stream: true });
  expect([response.status, await response.text(), response.headers.get('x-kvtier-retries')]).toEqual([
    200,
    role + token + done,
    '1',
  ]);
  two.answer = one.answer;
  const refused = await ask({ stream: true });
  expect([refused.status, await refused.json()]).toMatchObject([status, { error: { code } }]);
  await atRest();
});

it('a failure of a type that every object has is 500', async () => {
  await known('one');
  const error = '{"error":{"message":"it died","type":"constructor"}}';
  one.answer = streaming(`data: ${error}\n\n${done}`);
  const response = await ask({ stream: true }, { signal: AbortSignal.timeout(10_000) });
  expect([response.status, await response.text()]).toEqual([500, error]);
  await atRest();
});

it('a head that HTTP does not allow ends its request, here and at the pod', async () => {
  await known('one');
  const left = vi.fn(async () => ({ done: true as const, value: undefined }));
  const pieces = { next: async () => ({ done: false as const, value: Buffer.from(token) }), return: left };
  const body = { [Symbol.asyncIterator]: () => pieces };
  vi.spyOn(at.fleet, 'forward').mockResolvedValue({ status: 200, headers: { 'content-type': '\n' }, body });
  const response = await ask({}, { signal: AbortSignal.timeout(10_000) });
  expect([response.status, await response.json()]).toMatchObject([500, { error: { code: 'internal_error' } }]);
  expect(left).toHaveBeenCalledOnce();
  await atRest();
});

it('what a request is refused for in a stream goes on as it came, and is no first token', async () => {
  await known('one', 'two');
  const text = `data: {"error":{"message":"no such thing","code":400}}\n\n${done}`;
  one.answer = streaming(text);
  const response = await ask({ stream: true });
  expect([response.status, await response.text(), two.seen.length]).toEqual([200, text, 0]);
  await atRest();
  expect(await firstTokens()).toBe('0');
});

it('a client that leaves while its stream is held ends it at the pod', async () => {
  await known('one');
  one.answer = ({ response }) =>
    void response.writeHead(200, { 'content-type': 'text/event-stream' }).write(': ping\n\n');
  const abort = new AbortController();
  const asked = ask({ stream: true }, { signal: abort.signal }).catch(() => undefined);
  await vi.waitUntil(() => one.seen[0]?.response.headersSent, patience);
  abort.abort();
  await asked;
  await one.seen[0]!.left;
  await atRest();
});

it('streams of pods say what those of our own workers say to proxies', async () => {
  await known('one');
  await at.workers(at.named('a'), { name: 'one', kind: 'openai', address: one.address });
  at.engine.script = say([200], 'length');
  const names = ['content-type', 'cache-control', 'x-accel-buffering'];
  const headersOf = async (part: object): Promise<(string | null)[]> => {
    const response = await ask({ stream: true, ...part });
    await response.text();
    return names.map((name) => response.headers.get(name));
  };
  one.answer = streaming(token + done);
  const ours = await headersOf({ model: 'demo', messages: [{ role: 'user', content: 'a' }], max_tokens: 1 });
  expect(ours).toEqual(['text/event-stream; charset=utf-8', 'no-cache', 'no']);
  expect(await headersOf({})).toEqual(ours);
  one.answer = streaming(token + done, { 'cache-control': 'no-store' });
  expect(await headersOf({})).toEqual([ours[0], 'no-store', 'no']);
  one.answer = ({ response }) => void response.writeHead(200, { 'content-type': 'application/json' }).end('{}');
  expect(await headersOf({})).toEqual(['application/json', null, null]);
});

it('a body is let go when its answer begins', async () => {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const bytes = 4 << 20;
  const count = 8;
  await known('one');
  const text = JSON.stringify({ ...chat, stream: true, messages: [{ role: 'user', content: 'a'.repeat(bytes) }] });
  one.answer = ({ response }) => void response.writeHead(200, { 'content-type': 'text/event-stream' }).write(token);
  const held = (): number => {
    collect();
    return process.memoryUsage().arrayBuffers;
  };
  const before = held();
  const clients: ClientRequest[] = [];
  for (let i = 0; i < count; i++) {
    const headers = { 'content-type': 'application/json' };
    const client = httpRequest(at.server.url + route, { method: 'POST', headers });
    clients.push(client);
    const begun = once(client, 'response');
    client.end(text);
    await begun;
    one.seen.length = 0;
  }
  await vi.waitFor(() => expect(held() - before).toBeLessThan((count * bytes) / 2), patience);
  for (const client of clients) client.destroy();
  await atRest();
});

/** Workers with OpenAI's API: what goes there goes as it came, and comes back as it is. */
import { connect } from 'node:net';
import { Dispatcher, Saturated } from '@kvtier/dispatch';
import { PodHandOff } from '@kvtier/pod-handoff';
import { Pod, type PodRequest, say } from '@kvtier/registry/testing';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Harness, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const podOf = (model: string): Pod => Object.assign(new Pod(), { model });
const [one, two] = [podOf('pods'), podOf('pods')];
beforeEach(async () => {
  for (const pod of [one, two]) {
    pod.seen.length = 0;
    pod.answer = () => {};
    await pod.start();
  }
  await known();
});
/** The server knows both, and the first one is nearest. */
async function known(): Promise<void> {
  await at.workers(
    { name: 'one', kind: 'openai', address: one.address },
    { name: 'two', kind: 'openai', address: two.address },
  );
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  at.holdings.blocks.length = 0;
  at.holdings.blocks[at.fleet.workers().find((worker) => worker?.record.name === 'one')!.number] = 1;
}
afterEach(async () => {
  for (const pod of [one, two]) await pod.stop();
});

/** With what only such workers know; the first one is nearest to it. */
const body = {
  model: 'pods',
  messages: [{ role: 'user', content: 'a'.repeat(600) }],
  tools: [{ type: 'x' }],
  top_n: 1,
};
const ask = (part: object = {}, init: RequestInit = {}): Promise<Response> =>
  at.post('/v1/chat/completions', { ...body, ...part }, init);
const atRest = (): Promise<unknown> => vi.waitUntil(() => at.dispatcher.stats().given === 0, patience);
const says =
  (status: number, text: string) =>
  ({ response }: PodRequest): void =>
    void response.writeHead(status, { 'content-type': 'application/json', 'x-inner': 'y' }).end(text);

const role = 'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n';
const failed = 'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n';
const events =
  (...all: string[]) =>
  ({ response }: PodRequest): void =>
    void response.writeHead(200, { 'content-type': 'text/event-stream' }).end(`${all.join('')}data: [DONE]\n\n`);

it('passes body and answer on byte by byte, with the worker’s name', async () => {
  const text = '{"as": "it  is",\n "é": 1}';
  one.answer = says(200, text);
  const trace = { traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01', tracestate: 'a=b' };
  const response = await ask({}, { headers: { 'content-type': 'application/json', 'x-request-id': 'mine', ...trace } });
  expect(one.seen[0]!.headers).toMatchObject(trace);
  expect([response.status, await response.text()]).toEqual([200, text]);
  expect(one.seen[0]!.body).toBe(JSON.stringify(body));
  expect([one.seen[0]!.path, one.seen[0]!.headers['x-request-id']]).toEqual(['/v1/chat/completions', 'mine']);
  const header = (name: string) => response.headers.get(name);
  expect(['x-request-id', 'x-kvtier-worker', 'x-kvtier-policy', 'x-kvtier-held', 'content-type'].map(header)).toEqual([
    'mine',
    'one',
    'predicted',
    '1 blocks; gpu=1',
    'application/json',
  ]);
  expect(header('x-inner')).toBeNull();
  await atRest();
});

it('a name for its request that is none of ours is nobody’s', async () => {
  one.answer = says(200, '{}');
  for (const [name, isGood] of [
    ['a=b', false],
    ['a.b', true],
  ] as const) {
    const response = await ask({}, { headers: { 'content-type': 'application/json', 'x-request-id': name } });
    const told = response.headers.get('x-request-id');
    expect([told === name, one.seen.pop()!.headers['x-request-id']]).toEqual([isGood, told]);
  }
  await atRest();
});

it.each<[string, object, boolean | undefined]>([
  ['asks for events', { stream: true }, true],
  ['does not', { stream: false }, undefined],
  ['says nothing', {}, undefined],
  ['says it in its text alone', { messages: [{ role: 'user', content: '"stream": true' }] }, undefined],
])('what a pod is known to tell of its first token, of a body that %s', async (_, part, tells) => {
  const sent = vi.spyOn(at.fleet, 'sent');
  for (const pod of [one, two]) pod.answer = says(200, '{}');
  await (await ask(part)).text();
  expect(sent.mock.calls[0]![1].tellsFirstToken).toBe(tells);
  sent.mockRestore();
  await atRest();
});

it('an answer that came whole is measured', async () => {
  one.answer = says(200, '{"ok":1}');
  const asked = 20;
  for (let each = 0; each < asked; each++) expect(await (await ask()).text()).toBe('{"ok":1}');
  await atRest();
  const isCounted = async () => (await at.metricsText()).includes(`kvtier_request_seconds_count ${asked}\n`);
  await vi.waitUntil(isCounted, patience);
  // Not so what the pod refuses.
  one.answer = says(400, '{}');
  expect((await ask()).status).toBe(400);
  one.answer = says(200, '{"ok":1}');
  await (await ask()).text();
  await atRest();
  await vi.waitUntil(
    async () => (await at.metricsText()).includes(`kvtier_request_seconds_count ${asked + 1}\n`),
    patience,
  );
});

it('streams without waiting for more', async () => {
  let pod: PodRequest | undefined;
  one.answer = (request) => {
    pod = request;
    request.response.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: 1\n\n');
  };
  const response = await ask({ stream: true });
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  expect((await reader.read()).value).toBe('data: 1\n\n');
  pod!.response.write('data: 2\n\n');
  expect((await reader.read()).value).toBe('data: 2\n\n');
  pod!.response.end('data: [DONE]\n\n');
  expect((await reader.read()).value).toBe('data: [DONE]\n\n');
  expect((await reader.read()).done).toBe(true);
  await atRest();
});

it('what the worker says of a bad request is told as it is', async () => {
  one.answer = says(400, '{"object":"error"}');
  const response = await ask();
  expect([response.status, await response.text()]).toEqual([400, '{"object":"error"}']);
  expect(two.seen).toHaveLength(0);
  await atRest();
});

it.each<[string, (request: PodRequest) => void]>([
  ['is full', says(429, '{}')],
  ['is not ready', says(503, '{}')],
  ['fails', says(500, '{}')],
  ['hangs up', ({ response }) => void response.socket!.destroy()],
  [
    'hangs up behind its status',
    ({ response }) => {
      response.writeHead(200);
      response.flushHeaders();
      setImmediate(() => response.socket!.destroy());
    },
  ],
  ['fails in its first event', events(failed)],
  ['fails behind its role', events(role, failed)],
])('one that %s is not the last', async (_, answer) => {
  one.answer = answer;
  two.answer = says(200, '{"ok":1}');
  const response = await ask();
  expect([response.status, await response.text()]).toEqual([200, '{"ok":1}']);
  const header = (name: string) => response.headers.get(`x-kvtier-${name}`);
  expect([header('worker'), header('retries'), header('degraded')]).toEqual(['two', '1', 'retried']);
  expect(two.seen[0]!.body).toBe(JSON.stringify(body));
  await atRest();
});

describe('blocks that a pod lends to one reader, as a client’s proxy names them', () => {
  const lent = { do_remote_prefill: true, remote_engine_id: 'p', remote_block_ids: [[1, 2]] };
  const refuses = says(500, '{}');

  beforeEach(async () => {
    const choose: Dispatcher['choose'] = (...asked) => at.dispatcher.choose(...asked);
    const calls = { workers: () => at.fleet.workers(), forward: () => Promise.reject(new Error('nobody prefills')) };
    await at.open({ pods: new PodHandOff({ dispatch: { choose }, pods: calls, config: { clientParams: true } }) });
    await known();
  });

  it.each<[string, object, object]>([
    ['are not shown to a second pod, which computes the prompt', lent, {}],
    ['while what has names in a store is', { ...lent, remote_block_ids: [[]], kvtier: {} }, { isKept: true }],
    ['and so is what asks for prefill', { do_remote_decode: true }, { isKept: true }],
  ])('%s', async (_, params, { isKept = false }: { isKept?: boolean }) => {
    one.answer = refuses;
    two.answer = says(200, '{"ok":1}');
    const response = await ask({ kv_transfer_params: params });
    expect([response.status, response.headers.get('x-kvtier-worker')]).toEqual([200, 'two']);
    expect(JSON.parse(one.seen[0]!.body)).toEqual({ ...body, kv_transfer_params: params });
    expect(JSON.parse(two.seen[0]!.body)).toEqual(isKept ? { ...body, kv_transfer_params: params } : body);
    await atRest();
  });

  it('end the request with the first pod, where they cannot be taken out of the body', async () => {
    one.answer = refuses;
    const many = Object.fromEntries(Array.from({ length: 300 }, (_, at) => [`x${at}`, 1]));
    expect((await ask({ kv_transfer_params: lent, ...many })).status).toBe(500);
    expect([one.seen.length, two.seen.length]).toEqual([1, 0]);
    await atRest();
  });
});

it('429 when all are full', async () => {
  one.answer = says(429, '{}');
  two.answer = says(429, '{}');
  const response = await ask();
  expect([response.status, response.headers.get('retry-after'), (await jsonOf(response)).error.code]).toEqual([
    429,
    '1',
    'queue_full',
  ]);
  await atRest();
});

it.each([
  ['30', '30'],
  ['3600', '60'],
  ['0', '1'],
  ['Wed, 21 Oct 2026 07:28:00 GMT', '1'],
])('when a pod says to come again after %s, clients are told %s', async (theirs, ours) => {
  two.answer = says(500, '{}');
  for (const status of [429, 503]) {
    const refuses = ({ response }: PodRequest): void =>
      void response.writeHead(status, { 'retry-after': theirs }).end();
    for (const pod of [one, two]) pod.answer = refuses;
    const response = await ask();
    expect([response.status, response.headers.get('retry-after')]).toEqual([status, ours]);
  }
  await atRest();
});

it('that all are saturated is told, and not what one pod said before', async () => {
  one.answer = says(500, '{}');
  const choose = vi.spyOn(at.dispatcher, 'choose');
  const chosen = choose.getMockImplementation() ?? Dispatcher.prototype.choose.bind(at.dispatcher);
  choose.mockImplementation((request, signal) =>
    request.except.size === 0 ? chosen(request, signal) : Promise.reject(new Saturated('model pods: full', 17)),
  );
  const response = await ask();
  choose.mockRestore();
  expect([response.status, response.headers.get('retry-after')]).toEqual([429, '17']);
  await atRest();
});

it('only a streamed answer has a first token that is measured', async () => {
  const count = async (): Promise<string | undefined> =>
    /time_to_first_token_seconds_count (\d+)/.exec(await at.metricsText())?.[1];
  one.answer = says(200, '{"ok":1}');
  expect((await ask()).status).toBe(200);
  one.answer = says(400, '{"object":"error"}');
  expect((await ask({ stream: true })).status).toBe(400);
  await atRest();
  expect(await count()).toBe('0');
  one.answer = ({ response }) =>
    void response.writeHead(200, { 'content-type': 'text/event-stream' }).end('data: 1\n\ndata: [DONE]\n\n');
  await (await ask({ stream: true })).text();
  await atRest();
  expect(await count()).toBe('1');
});

it('a pod is not told to drain: that is discovery’s', async () => {
  const answer = await at.post('/admin/drain', { worker: 'one' });
  expect([answer.status, await answer.json()]).toMatchObject([409, { error: { code: 'not_ours', param: 'worker' } }]);
});

it('of a streamed answer the pauses between its pieces are measured, but for that before its end', async () => {
  let go = (): void => {};
  const pieces = ['data: 1\n\n', 'data: 2\n\n', 'data: 3\n\n', 'data: [DONE]\n\n'];
  one.answer = async ({ response }) => {
    response.writeHead(200, { 'content-type': 'text/event-stream' });
    for (const piece of pieces) {
      const read = new Promise<void>((done) => {
        go = done;
      });
      response.write(piece);
      await read;
    }
    response.end();
  };
  const { body } = await ask({ stream: true });
  const seen: string[] = [];
  for await (const piece of body!) {
    seen.push(Buffer.from(piece).toString());
    go();
  }
  expect(seen).toEqual(pieces);
  await atRest();
  expect(await at.metricsText()).toContain('\nkvtier_request_time_between_tokens_seconds_count 2\n');
});

describe('a request that wants its first token soon', () => {
  const soon = (name: string, ms: number) => ({ headers: { 'content-type': 'application/json', [name]: String(ms) } });
  /** Prompt tokens that each pod has to compute before, at 2,000 a second. */
  const busy = (tokens: number): void => {
    for (const worker of at.fleet.workers())
      if (worker) at.fleet.sent(worker.number, { requestId: 'r', tokensAhead: tokens, blocks: 1, loadS: 0 });
  };

  it.each(['x-slo-ttft-ms', 'x-llm-d-slo-ttft-ms'])(
    'is refused by prediction, and nothing is sent (%s)',
    async (name) => {
      one.answer = says(200, '{}');
      two.answer = says(200, '{}');
      expect((await ask({}, soon(name, 2_000))).status).toBe(200);
      busy(20_000);
      const refused = await ask({}, soon(name, 2_000));
      expect([refused.status, (await jsonOf(refused)).error.code]).toEqual([429, 'queue_full']);
      // 20,000 tokens at 2,000 a second, and less than one for its own; less the two that it would have waited.
      expect(Number(refused.headers.get('retry-after'))).toBeGreaterThanOrEqual(8);
      expect([one.seen.length, two.seen.length]).toEqual([1, 0]);
    },
  );

  it('by the configuration where it does not say so; one pod that is alone is asked no more than many', async () => {
    await at.open({ ttftMs: 2_000 });
    await at.workers({ name: 'one', kind: 'openai', address: one.address });
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
    one.answer = says(200, '{}');
    expect((await ask()).status).toBe(200);
    busy(20_000);
    expect((await ask()).status).toBe(429);
    expect((await ask({}, soon('x-slo-ttft-ms', 60_000))).status).toBe(200);
    expect(one.seen).toHaveLength(2);
  });

  it('a time that is none is named', async () => {
    const refused = await ask({}, soon('x-llm-d-slo-ttft-ms', -1));
    expect([refused.status, await refused.json()]).toMatchObject([
      400,
      { error: { message: expect.stringContaining('header x-llm-d-slo-ttft-ms') } },
    ]);
  });
});

it.each(['x-session-id', 'x-session-token', 'x-session-affinity', 'x-claude-code-session-id'])(
  'a session that the header %s names goes before one of the body, for the choice and for the pod',
  async (name) => {
    one.answer = says(200, '{}');
    const choose = vi.spyOn(at.dispatcher, 'choose');
    await ask({ user: 'body' }, { headers: { 'content-type': 'application/json', [name]: 'header' } });
    await ask({ user: 'body' });
    const sessions = choose.mock.calls.map(([request]) => request.session);
    choose.mockRestore();
    expect([sessions, one.seen[0]!.headers[name]]).toEqual([['header', 'body'], 'header']);
  },
);

it('an answer that has begun is cut with its worker', async () => {
  one.answer = ({ response }) => void response.writeHead(200).write('data: 1\n\n');
  const response = await ask({ stream: true });
  const reader = response.body!.getReader();
  await reader.read();
  one.seen[0]!.response.socket!.destroy();
  await expect(reader.read()).rejects.toThrow();
  expect(two.seen).toHaveLength(0);
  await atRest();
});

it.each(['before the first byte', 'in the middle'])('a client that leaves %s ends its request there', async (when) => {
  if (when === 'in the middle') one.answer = ({ response }) => void response.writeHead(200).write('data: 1\n\n');
  const abort = new AbortController();
  const asked = ask({ stream: true }, { signal: abort.signal }).catch(() => undefined);
  if (when === 'in the middle') await (await asked)!.body!.getReader().read();
  else await vi.waitUntil(() => one.seen.length === 1, patience);
  abort.abort();
  await asked;
  await one.seen[0]!.left;
  await atRest();
  expect(at.dispatcher.stats()).toMatchObject({ waiting: 0, given: 0 });
});

it('serves models of both kinds, each by its own workers', async () => {
  const { engine } = at;
  await at.workers(at.named('a'), { name: 'one', kind: 'openai', address: one.address });
  await vi.waitUntil(async () => (await at.client.models.list()).data.length === 2, patience);
  one.answer = says(200, '{}');
  expect((await ask()).status).toBe(200);
  expect(engine.seen).toHaveLength(0);
  const refused = await at.post('/v1/chat/completions', { ...body, model: 'demo' });
  expect([refused.status, (await jsonOf(refused)).error.code]).toEqual([400, 'invalid_value']);
});

it('of a model that workers of both kinds serve, our own get the requests', async () => {
  const pod = podOf('demo');
  await pod.start();
  try {
    await at.workers(at.named('a'), { name: 'pod', kind: 'openai', address: pod.address });
    at.holdings.blocks.length = 0;
    at.engine.script = say([200], 'length');
    for (let i = 0; i < 6; i++)
      expect((await at.post('/v1/completions', { prompt: [5, 6], max_tokens: 1 })).status).toBe(200);
    expect([at.engine.seen.length, pod.seen.length]).toEqual([6, 0]);
  } finally {
    await pod.stop();
  }
});

it('one that refuses and never ends its refusal is not waited for', async () => {
  one.answer = ({ response }) => void response.writeHead(503).flushHeaders();
  two.answer = says(200, '{"ok":1}');
  const response = await ask({}, { signal: AbortSignal.timeout(5_000) });
  expect([response.status, response.headers.get('x-kvtier-worker')]).toEqual([200, 'two']);
  await one.seen[0]!.left;
  await atRest();
});

it('an answer that a pod takes its time for is no standstill of ours', async () => {
  const stallMs = 50;
  await at.open({ limits: { stallMs } });
  await at.workers({ name: 'one', kind: 'openai', address: one.address });
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  const begun = ({ response }: PodRequest): void => {
    response.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: 1\n\n');
  };
  for (const answer of [() => {}, begun]) {
    one.answer = answer;
    const asked = ask({ stream: true });
    await vi.waitUntil(() => one.seen.length === 1, patience);
    await new Promise((resolve) => setTimeout(resolve, 2 * stallMs));
    const health = await fetch(`${at.server.url}/health`);
    expect([health.status, await health.json()]).toMatchObject([200, { progress: { running: 1, silent_ms: 0 } }]);
    one.seen.pop()!.response.end('data: [DONE]\n\n');
    expect(await (await asked).text()).toMatch(/\[DONE\]\n\n$/);
  }
  await atRest();
});

describe('time to read', () => {
  const unreadMs = 200;
  /** Its pod has begun the answer. */
  const begun = async (): Promise<void> => {
    await at.open({ limits: { unreadMs } });
    await at.workers({ name: 'one', kind: 'openai', address: one.address });
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
    one.answer = ({ response }) => void response.writeHead(200).write('data: 1\n\n');
  };

  it('does not run while the worker is silent', async () => {
    await begun();
    const reader = (await ask({ stream: true })).body!.pipeThrough(new TextDecoderStream()).getReader();
    expect((await reader.read()).value).toBe('data: 1\n\n');
    await new Promise((resolve) => setTimeout(resolve, 3 * unreadMs));
    one.seen[0]!.response.end('data: 2\n\n');
    expect((await reader.read()).value).toBe('data: 2\n\n');
    expect((await reader.read()).done).toBe(true);
    await atRest();
  });

  it('ends the request of a client that takes nothing', async () => {
    await begun();
    one.answer = ({ response }) => {
      response.writeHead(200);
      const more = (): void => void (response.write(Buffer.alloc(1 << 20)) && setImmediate(more));
      response.on('drain', more);
      more();
    };
    const socket = connect(Number(new URL(at.server.url).port), '127.0.0.1');
    socket.pause().on('error', () => {});
    const text = JSON.stringify({ ...body, stream: true });
    const head = `POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json`;
    socket.write(`${head}\r\ncontent-length: ${Buffer.byteLength(text)}\r\n\r\n${text}`);
    await vi.waitUntil(() => one.seen.length === 1, patience);
    await one.seen[0]!.left;
    await atRest();
    socket.destroy();
  });
});

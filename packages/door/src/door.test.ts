import { mkdtempSync, rmSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { createLogger } from '@kvtier/telemetry';
import OpenAI, { APIError } from 'openai';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { cacheUse, event, fail, ScriptedEngine, say } from '../test/scripted-engine.ts';
import { type Door, type DoorOptions, startDoor } from './door.ts';
import { loadTokenizer } from './tokenizer.ts';

const modelDir = join(import.meta.dirname, '../../../models/demo/model');
const tokenizer = loadTokenizer(modelDir);
const ids = (text: string): number[] => tokenizer.encode(text, { addSpecialTokens: false });
const eos = 2;

let dir: string;
let engine: ScriptedEngine;
let door: Door;
let client: OpenAI;

beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-door-'));
  engine = new ScriptedEngine(`unix:${dir}/engine.sock`, modelDir);
  await engine.start();
  await open();
});
afterEach(async () => {
  await door.close();
  await engine.stop();
  rmSync(dir, { recursive: true, force: true });
});

async function open(options: Partial<DoorOptions> = {}): Promise<void> {
  await door?.close();
  const logger = createLogger('door-test', 'silent');
  door = await startDoor({ host: '127.0.0.1', port: 0, engine: `unix:${dir}/engine.sock`, logger, ...options });
  client = new OpenAI({ baseURL: `${door.url}/v1`, apiKey: 'none', maxRetries: 0 });
}

const post = (path: string, body: unknown, init: RequestInit = {}) =>
  fetch(door.url + path, {
    method: 'POST',
    headers: { 'content-type': 'application/json' },
    body: typeof body === 'string' ? body : JSON.stringify(body),
    ...init,
  });
const caught = async (promise: Promise<unknown>): Promise<APIError> => {
  const thrown = await promise.then(
    () => undefined,
    (error: unknown) => error,
  );
  expect(thrown).toBeInstanceOf(APIError);
  return thrown as APIError;
};
const jsonOf = async (response: Response) => (await response.json()) as { done?: boolean; error: { code: string } };
/** The JSON of each event of a stream, the last one as text. */
const eventsOf = async (response: Response): Promise<unknown[]> =>
  (await response.text())
    .split('\n\n')
    .filter((line) => line !== '')
    .map((line) => (line === 'data: [DONE]' ? '[DONE]' : JSON.parse(line.slice('data: '.length))));

describe('completions', () => {
  it('answers in exactly OpenAI’s shape, with cached tokens and the tiers they came from', async () => {
    const cache = cacheUse({
      promptTokens: 5,
      cachedTokens: 4,
      tokensByTier: { engine: 1, disk: 3 },
      queueUs: 10,
      loadUs: 20,
      prefillUs: 30,
    });
    engine.script = say([...ids(' 34'), eos], 'stop', cache);
    const prompt = '# Employees\nAnswer:';
    const response = await post('/v1/completions', { prompt, max_tokens: 8, temperature: 0 });
    expect(response.status).toBe(200);
    expect(response.headers.get('x-request-id')).toMatch(/^[0-9a-f-]{36}$/);
    const { requestId } = engine.seen[0]!.request;
    expect(requestId).toMatch(/^[0-9a-f-]{36}$/);
    expect(await response.json()).toEqual({
      id: `cmpl-${requestId}`,
      object: 'text_completion',
      created: expect.any(Number),
      model: 'demo',
      choices: [{ index: 0, text: ' 34', logprobs: null, finish_reason: 'stop' }],
      usage: {
        prompt_tokens: ids(prompt).length,
        completion_tokens: 2,
        total_tokens: ids(prompt).length + 2,
        prompt_tokens_details: { cached_tokens: 4 },
      },
      kvtier: { tokens_by_tier: { engine: 1, disk: 3 }, queue_us: 10, load_us: 20, prefill_us: 30 },
    });
    expect(engine.seen[0]!.request).toEqual({
      requestId,
      promptTokenIds: ids(prompt),
      maxTokens: 8,
      temperature: 0,
      topK: 0,
      topP: 1,
      seed: undefined,
      ignoreEos: false,
      stopTokenIds: [],
      cacheSalt: '',
      loraName: '',
    });
  });

  it('has OpenAI’s defaults and passes every sampling parameter on', async () => {
    engine.script = say(ids(' 34'), 'length');
    await client.completions.create({ model: 'demo', prompt: 'a' });
    expect(engine.seen[0]!.request).toMatchObject({ maxTokens: 16, temperature: 1, topP: 1, topK: 0 });
    const extensions = { top_k: 7, ignore_eos: true, stop_token_ids: [9], cache_salt: 's' };
    await client.completions.create({
      model: 'demo',
      prompt: 'a',
      seed: -1,
      top_p: 0.5,
      temperature: 0.25,
      ...extensions,
    });
    expect(engine.seen[1]!.request).toMatchObject({
      temperature: 0.25,
      topP: 0.5,
      topK: 7,
      seed: 2n ** 64n - 1n,
      ignoreEos: true,
      stopTokenIds: [9],
      cacheSalt: 's',
    });
  });

  it('takes texts, token ids and lists of them; n answers each, with seeds of their own', async () => {
    engine.script = (call, request) => say(request.promptTokenIds, 'length')(call);
    const several = await client.completions.create({ model: 'demo', prompt: [' John', ' Jane'], n: 2, seed: 5 });
    expect(several.choices.map(({ index, text }) => [index, text])).toEqual([
      [0, ' John'],
      [1, ' John'],
      [2, ' Jane'],
      [3, ' Jane'],
    ]);
    expect(several.usage).toMatchObject({ prompt_tokens: 2, completion_tokens: 4, total_tokens: 6 });
    const seeds = engine.seen.map(({ request }) => request.seed);
    expect(seeds[0]).toBe(5n);
    expect(new Set(seeds)).toEqual(new Set([5n, BigInt.asUintN(64, 5n + 0x9e3779b97f4a7c15n)]));
    expect((await client.completions.create({ model: 'demo', prompt: ids(' John Doe') })).choices[0]!.text).toBe(
      ' John Doe',
    );
    const lists = await client.completions.create({ model: 'demo', prompt: [ids(' John'), ids(' 34')] });
    expect(lists.choices.map(({ text }) => text)).toEqual([' John', ' 34']);
  });

  it('echoes the prompt', async () => {
    engine.script = say(ids(' 34'), 'length');
    const echoed = await client.completions.create({ model: 'demo', prompt: ids('Age:'), echo: true });
    expect(echoed.choices[0]!.text).toBe('Age: 34');
    const stream = await client.completions.create({ model: 'demo', prompt: 'Age:', echo: true, stream: true });
    let text = '';
    for await (const chunk of stream) text += chunk.choices[0]?.text ?? '';
    expect(text).toBe('Age: 34');
  });

  it('streams, never a half character, and usage when asked', async () => {
    engine.script = say(ids(' é日'), 'length', cacheUse({ cachedTokens: 1, tokensByTier: { arena: 1 } }));
    const chunks = await eventsOf(
      await post('/v1/completions', { prompt: 'a', stream: true, stream_options: { include_usage: true } }),
    );
    const head = {
      id: expect.stringMatching(/^cmpl-/),
      object: 'text_completion',
      created: expect.any(Number),
      model: 'demo',
    };
    const choice = (text: string, reason: string | null) => [{ index: 0, text, logprobs: null, finish_reason: reason }];
    const tokens = ids(' é日').length;
    expect(chunks).toEqual([
      { ...head, choices: choice(' ', null), usage: null },
      { ...head, choices: choice('é', null), usage: null },
      { ...head, choices: choice('日', 'length'), usage: null },
      {
        ...head,
        choices: [],
        usage: {
          prompt_tokens: 1,
          completion_tokens: tokens,
          total_tokens: tokens + 1,
          prompt_tokens_details: { cached_tokens: 1 },
        },
        kvtier: { tokens_by_tier: { arena: 1 }, queue_us: 0, load_us: 0, prefill_us: 0 },
      },
      '[DONE]',
    ]);
  });

  it('ends before a stop string that spans tokens and cancels the engine’s call', async () => {
    engine.script = (call) => {
      for (const id of ids(' 34\nQuestion: What')) call.write(event({ tokenIds: [id] })); // and never ends
    };
    const answer = await client.completions.create({ model: 'demo', prompt: 'a', stop: ['\nQuestion:', 'zz'] });
    expect(answer.choices[0]).toMatchObject({ text: ' 34', finish_reason: 'stop' });
    expect(answer.usage!.completion_tokens).toBe(ids(' 34\nQuestion:').length);
    await engine.seen[0]!.cancelled;
  });
});

describe('chat', () => {
  const messages = [
    { role: 'system' as const, content: '# Employees\n| 1 | John Doe | 29 | Engineer | Canada |' },
    { role: 'user' as const, content: [{ type: 'text' as const, text: 'What is the age of John Doe?' }] },
  ];
  const prompt = `${messages[0]!.content}\nQuestion: What is the age of John Doe?\nAnswer:`;

  it('writes the prompt by the model’s template and goes to the model’s end', async () => {
    engine.script = say([...ids(' 29'), eos]);
    const { id, created, ...answer } = await client.chat.completions.create({ model: 'demo', messages });
    expect(id).toMatch(/^chatcmpl-/);
    expect(created).toBeGreaterThan(0);
    expect(answer).toMatchObject({
      object: 'chat.completion',
      model: 'demo',
      choices: [
        {
          index: 0,
          message: { role: 'assistant', content: ' 29', refusal: null },
          logprobs: null,
          finish_reason: 'stop',
        },
      ],
    });
    expect(engine.seen[0]!.request.promptTokenIds).toEqual(ids(prompt));
    expect(engine.seen[0]!.request.maxTokens).toBe(4_096 - ids(prompt).length);
  });

  it('streams a role, the text and a finish reason', async () => {
    engine.script = say([...ids(' 29'), eos]);
    const body = { messages, stream: true, max_completion_tokens: 5 };
    const chunks = await eventsOf(await post('/v1/chat/completions', body));
    const head = { object: 'chat.completion.chunk', model: 'demo' };
    const choice = (delta: object, reason: string | null) => [
      { index: 0, delta, logprobs: null, finish_reason: reason },
    ];
    expect(chunks).toMatchObject([
      { ...head, choices: choice({ role: 'assistant', content: '', refusal: null }, null) },
      { ...head, choices: choice({ content: ' 29' }, null) },
      { ...head, choices: choice({}, 'stop'), kvtier: { tokens_by_tier: {} } },
      '[DONE]',
    ]);
    expect(engine.seen[0]!.request.maxTokens).toBe(5);
    const stream = client.chat.completions.stream({
      model: 'demo',
      messages,
      n: 2,
      stream_options: { include_usage: true },
    });
    const whole = await stream.finalChatCompletion();
    expect(whole.choices.map((choice) => choice.message.content)).toEqual([' 29', ' 29']);
    expect(whole.usage).toMatchObject({ prompt_tokens: ids(prompt).length, completion_tokens: 4 });
  });
});

describe('errors in OpenAI’s shape', () => {
  const completion = { model: 'demo', prompt: 'a' };

  it.each<[string, object, string, string]>([
    ['a wrong type', { max_tokens: 'many' }, 'max_tokens', 'invalid_value'],
    ['out of range', { temperature: 3 }, 'temperature', 'invalid_value'],
    ['too many answers', { n: 129 }, 'n', 'invalid_value'],
    ['unknown', { max_tokns: 3 }, 'max_tokns', 'unknown_parameter'],
    ['not served', { logprobs: 2 }, 'logprobs', 'invalid_value'],
    ['a penalty', { presence_penalty: 0.5 }, 'presence_penalty', 'invalid_value'],
    ['five stops', { stop: ['a', 'b', 'c', 'd', 'e'] }, 'stop', 'invalid_value'],
    ['a mixed prompt', { prompt: ['a', 1] }, 'prompt', 'invalid_value'],
    ['an empty prompt', { prompt: '' }, 'prompt', 'invalid_value'],
    ['a foreign token', { prompt: [1_344] }, 'prompt', 'invalid_value'],
    ['usage without a stream', { stream_options: {} }, 'stream_options', 'invalid_value'],
  ])('bad parameter: %s', async (_, part, param, code) => {
    const { status, error } = await caught(client.completions.create({ ...completion, ...part }));
    expect(status).toBe(400);
    expect(error).toMatchObject({ type: 'invalid_request_error', param, code });
    expect((error as Error).message).toContain(param);
    expect(engine.seen).toHaveLength(0);
  });

  it('missing parameters are named', async () => {
    expect((await jsonOf(await post('/v1/completions', {}))).error).toMatchObject({ param: 'prompt' });
    expect((await jsonOf(await post('/v1/chat/completions', {}))).error).toMatchObject({
      param: 'messages',
      code: 'missing_required_parameter',
    });
    const image = [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'x' } }] }];
    expect((await jsonOf(await post('/v1/chat/completions', { messages: image }))).error).toMatchObject({
      param: 'messages[0].content',
      message: 'messages[0].content: must be a text or a list of {type: "text", text}',
    });
  });

  it('accepts what changes nothing', async () => {
    engine.script = say(ids(' 34'), 'length');
    const harmless = { user: 'u', metadata: {}, store: false, logit_bias: {}, presence_penalty: 0, logprobs: null };
    await client.completions.create({ ...completion, ...harmless, best_of: 1, suffix: null });
    const chat = { messages: [{ role: 'developer', content: 't' }], response_format: { type: 'text' }, tools: [] };
    expect((await post('/v1/chat/completions', { ...chat, logprobs: false, service_tier: 'auto' })).status).toBe(200);
  });

  it('prompt too long', async () => {
    const long = caught(client.completions.create({ ...completion, prompt: ' 34'.repeat(4_096) }));
    expect((await long).error).toEqual({
      message:
        "This model's maximum context length is 4096 tokens. However, you requested 4097 tokens (4096 in the prompt, 1 for the completion). Shorten one of them.",
      type: 'invalid_request_error',
      param: 'prompt',
      code: 'context_length_exceeded',
    });
    const sum = await caught(client.completions.create({ ...completion, max_tokens: 4_096 }));
    expect(sum.error).toMatchObject({ param: 'max_tokens', code: 'context_length_exceeded' });
    const huge = await caught(client.completions.create({ ...completion, prompt: 'a'.repeat(5_000_000) }));
    expect(huge.error).toMatchObject({ code: 'context_length_exceeded', message: expect.stringContaining('at least') });
    engine.script = fail(new KvError('TOO_LONG', 'prompt: needs 90 blocks, the pool has 10'));
    expect((await caught(client.completions.create(completion))).error).toMatchObject({
      code: 'context_length_exceeded',
      message: 'prompt: needs 90 blocks, the pool has 10',
    });
  });

  it('unknown model', async () => {
    for (const ask of [
      () => client.completions.create({ ...completion, model: 'gpt-9' }),
      () => client.chat.completions.create({ model: 'gpt-9', messages: [{ role: 'user', content: 'a' }] }),
      () => client.models.retrieve('gpt-9'),
    ]) {
      const { status, error } = await caught(ask());
      expect(status).toBe(404);
      expect(error).toMatchObject({ type: 'invalid_request_error', param: 'model', code: 'model_not_found' });
    }
  });

  it('a full queue is 429 with retry-after, also at the door', async () => {
    engine.script = fail(new KvError('BUSY', 'queue: 1024 requests wait already', { retry: true }));
    const { status, error, headers } = await caught(client.completions.create({ ...completion, stream: true }));
    expect([status, headers!.get('retry-after')]).toEqual([429, '1']);
    expect(error).toMatchObject({ type: 'rate_limit_error', code: 'queue_full' });
    await open({ limits: { answersRunning: 2 } });
    expect((await caught(client.completions.create({ ...completion, n: 3 }))).status).toBe(429);
  });

  it('a failure in the middle of a stream is an event, and the other answers are cancelled', async () => {
    engine.script = (call, { requestId }) => {
      call.write(event({ tokenIds: ids(' 34') }));
      if (requestId.endsWith('-1')) fail(new KvError('IO', 'the executor failed'))(call);
    };
    const chunks = await eventsOf(await post('/v1/completions', { ...completion, n: 2, stream: true }));
    expect(chunks.at(-1)).toEqual({
      error: { message: 'the executor failed', type: 'server_error', param: null, code: 'io' },
    });
    await engine.seen.find(({ request }) => !request.requestId.endsWith('-1'))!.cancelled;
  });

  it('raw HTTP: bad JSON, no JSON, too large, unknown routes, a broken request', async () => {
    const told = async (response: Response) => [response.status, (await jsonOf(response)).error.code];
    expect(await told(await post('/v1/completions', '{"prompt": '))).toEqual([400, 'invalid_json']);
    expect(await told(await post('/v1/completions', ''))).toEqual([400, 'invalid_json']);
    expect(await told(await post('/v1/completions', '[]'))).toEqual([400, 'invalid_json']);
    const text = { headers: { 'content-type': 'text/plain' } };
    expect(await told(await post('/v1/completions', 'hi', text))).toEqual([415, 'unsupported_media_type']);
    expect(await told(await post('/v1/embeddings', {}))).toEqual([404, 'unknown_url']);
    expect(await told(await fetch(`${door.url}/v1/completions`))).toEqual([404, 'unknown_url']);
    expect(await told(await fetch(`${door.url}/v1/models/%zz`))).toEqual([400, 'invalid_request']);
    await open({ limits: { bodyBytes: 1_000 } });
    expect(await told(await post('/v1/completions', { prompt: 'x'.repeat(1_000) }))).toEqual([
      413,
      'request_too_large',
    ]);
    expect(await rawRequest('NONSENSE\r\n\r\n')).toMatch(/^HTTP\/1\.1 400 .*"code":"invalid_http"/s);
  });
});

describe('a client that leaves', () => {
  it('before the first token: the engine’s call is cancelled', async () => {
    const abort = new AbortController();
    const pending = client.completions.create({ model: 'demo', prompt: 'a' }, { signal: abort.signal });
    const ended = expect(pending).rejects.toThrow('aborted');
    await vi.waitUntil(() => engine.seen.length === 1);
    abort.abort();
    await ended;
    await engine.seen[0]!.cancelled;
    await vi.waitUntil(async () =>
      (await metricsText()).includes('requests_total{route="/v1/completions",status="499"} 1'),
    );
    expect(await metricsText()).toContain('kvtier_door_answers_running 0');
  });

  it('in the middle of a stream: the same', async () => {
    engine.script = (call) => void call.write(event({ tokenIds: ids(' 34') }));
    const stream = await client.completions.create({ model: 'demo', prompt: 'a', n: 2, stream: true });
    for await (const chunk of stream) {
      expect(chunk.choices[0]!.text).toBe(' 34');
      break; // the OpenAI client aborts the request
    }
    await Promise.all(engine.seen.map((seen) => seen.cancelled));
    expect(engine.seen).toHaveLength(2);
  });

  it('that does not read holds the engine’s stream back instead of filling memory', async () => {
    const tokensPerEvent = 2_000;
    const text = ' Photographer'.repeat(tokensPerEvent);
    const tokenIds = ids(text);
    const wantedBytes = 64 << 20; // far beyond what the kernel and the streams between may hold
    let writtenBytes = 0;
    let stalled = false;
    engine.script = async (call) => {
      while (writtenBytes < wantedBytes && !stalled) {
        writtenBytes += text.length;
        if (call.write(event({ tokenIds }))) continue;
        stalled = await new Promise<boolean>((resolve) => {
          const timer = setTimeout(resolve, 1_000, true);
          call.once('drain', () => {
            clearTimeout(timer);
            resolve(false);
          });
        });
      }
    };
    const body = JSON.stringify({ prompt: 'a', stream: true, max_tokens: 4_000 });
    const socket = connect(Number(new URL(door.url).port), '127.0.0.1').pause();
    socket.write(
      `POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`,
    );
    await vi.waitUntil(() => stalled || writtenBytes >= wantedBytes, { timeout: 20_000 });
    expect(writtenBytes).toBeLessThan(wantedBytes / 2);
    socket.destroy();
    await engine.seen[0]!.cancelled;
  });
});

describe('models, health, metrics, admin', () => {
  it('lists the one model', async () => {
    const listed = await client.models.list();
    expect(listed.data).toEqual([
      { id: 'demo', object: 'model', created: expect.any(Number), owned_by: 'kvtier', max_model_len: 4_096 },
    ]);
    expect((await client.models.retrieve('demo')).id).toBe('demo');
  });

  it('health says what is served', async () => {
    const response = await fetch(`${door.url}/health`);
    expect([response.status, await response.json()]).toEqual([
      200,
      {
        status: 'ok',
        engine: {
          model: 'demo',
          backend: 'cpu',
          max_model_tokens: 4_096,
          tier_attached: true,
          block_tokens: 16,
          block_count: 100,
          block_bytes: 16_384,
        },
        progress: { running: 0, finished: 0, silent_ms: 0 },
      },
    ]);
  });

  it('health is 503 when answers run without a token', async () => {
    await open({ limits: { stallMs: 0 } });
    const pending = client.completions.create({ model: 'demo', prompt: 'a' }).catch(() => 'ended');
    await vi.waitUntil(async () => (await fetch(`${door.url}/health`)).status === 503);
    engine.seen.at(-1)!;
    await engine.stop();
    expect(await pending).toBe('ended');
  });

  it('metrics are ours and the engine’s', async () => {
    engine.script = say(ids(' 34'), 'length', cacheUse({ cachedTokens: 3, tokensByTier: { disk: 3 } }));
    await client.completions.create({ model: 'demo', prompt: 'a' });
    const text = await metricsText();
    expect(text).toContain('kvtier_door_requests_total{route="/v1/completions",status="200"} 1');
    expect(text).toContain('kvtier_door_cached_tokens_total{tier="disk"} 3');
    expect(text).toContain('kvtier_door_engine_up 1');
    expect(text).toMatch(/\nkvtier_engine_steps_total 7\n$/);
  });

  it('resets the engine’s prefix cache', async () => {
    expect(await (await post('/admin/reset_prefix_cache', {})).json()).toEqual({ done: true });
    expect(await (await fetch(`${door.url}/admin/reset_prefix_cache`, { method: 'POST' })).json()).toEqual({
      done: false,
    });
  });

  it('names a request as the client did', async () => {
    const named = (id: string) => fetch(`${door.url}/health`, { headers: { 'x-request-id': id } });
    expect((await named('mine-1')).headers.get('x-request-id')).toBe('mine-1');
    expect((await named('not this one')).headers.get('x-request-id')).toMatch(/^[0-9a-f-]{36}$/);
  });
});

describe('an engine that comes and goes', () => {
  it('ends running requests clearly, is 503 while away, and is found again', async () => {
    engine.script = (call) => void call.write(event({ tokenIds: ids(' 34') }));
    const stream = await client.completions.create({ model: 'demo', prompt: 'a', stream: true });
    const reading = (async () => {
      for await (const _ of stream);
    })();
    const streamEnded = caught(reading);
    await vi.waitUntil(() => engine.seen.length === 1);
    await engine.stop();
    expect((await streamEnded).error).toMatchObject({ code: 'engine_unavailable' });
    const { status, error, headers } = await caught(client.completions.create({ model: 'demo', prompt: 'a' }));
    expect([status, headers!.get('retry-after')]).toEqual([503, '1']);
    expect(error).toMatchObject({ type: 'server_error', code: 'engine_unavailable' });
    const health = await fetch(`${door.url}/health`);
    expect([health.status, (await jsonOf(health)).error.code]).toEqual([503, 'engine_unavailable']);
    expect(await metricsText()).toContain('kvtier_door_engine_up 0');

    engine = new ScriptedEngine(`unix:${dir}/engine.sock`, modelDir);
    engine.script = say(ids(' 34'), 'length');
    await engine.start();
    await vi.waitUntil(async () => (await fetch(`${door.url}/health`)).status === 200, { timeout: 5_000 });
    expect((await client.completions.create({ model: 'demo', prompt: 'a' })).choices[0]!.text).toBe(' 34');
  });

  it('may come after the door', async () => {
    await engine.stop();
    await open({ firstContactMs: 0 });
    expect((await fetch(`${door.url}/v1/models`)).status).toBe(503);
    engine = new ScriptedEngine(`unix:${dir}/engine.sock`, modelDir);
    await engine.start();
    await vi.waitUntil(async () => (await fetch(`${door.url}/v1/models`)).status === 200, { timeout: 5_000 });
  });

  it('with a model that has no tokenizer: the start fails with one line', async () => {
    engine.description = { ...engine.description, modelDir: dir };
    await expect(open()).rejects.toMatchObject({ code: 'MODEL', message: expect.stringContaining('tokenizer.json') });
  });
});

describe('the start', () => {
  const start = (part: Partial<DoorOptions>) =>
    startDoor({
      host: '127.0.0.1',
      port: 0,
      engine: `unix:${dir}/engine.sock`,
      logger: createLogger('door-test', 'silent'),
      ...part,
    });

  it('says when the port is taken', async () => {
    const port = Number(new URL(door.url).port);
    await expect(start({ port })).rejects.toMatchObject({
      code: 'LOCKED',
      message: `127.0.0.1:${port}: another process listens there; choose another port with --port`,
    });
  });

  it('refuses to listen beyond this machine', async () => {
    await expect(start({ host: '0.0.0.0' })).rejects.toMatchObject({ code: 'CONFIG' });
  });
});

describe('the end', () => {
  it('cuts answers after the grace and tells their clients', async () => {
    await open({ limits: { closeGraceMs: 20 } });
    const pending = caught(client.completions.create({ model: 'demo', prompt: 'a' }));
    await vi.waitUntil(() => engine.seen.length === 1);
    await door.close();
    expect((await pending).error).toMatchObject({ message: 'the door is closing; try again' });
    await engine.seen[0]!.cancelled;
  });
});

const metricsText = async (): Promise<string> => (await fetch(`${door.url}/metrics`)).text();

/** The whole answer to bytes written as they are. */
function rawRequest(text: string): Promise<string> {
  return new Promise((resolve, reject) => {
    const socket = connect(Number(new URL(door.url).port), '127.0.0.1', () => socket.end(text));
    let answer = '';
    socket.on('data', (bytes) => (answer += bytes));
    socket.on('end', () => resolve(answer));
    socket.on('error', reject);
  });
}

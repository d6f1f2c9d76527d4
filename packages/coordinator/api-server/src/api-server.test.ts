/** What the API server answers: completions, chat and every error, asked by OpenAI's own client and by raw HTTP. */
import { connect } from 'node:net';
import { KvError } from '@kvtier/errors';
import { cacheUse, event, fail, greedy, say } from '@kvtier/registry/testing';
import { describe, expect, it } from 'vitest';
import { caught, eos, eventsOf, Harness, ids, jsonOf } from './testing/harness.ts';

const at = new Harness();

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
    at.engine.script = say([...ids(' 34'), eos], 'stop', cache);
    const prompt = '# Employees\nAnswer:';
    const response = await at.post('/v1/completions', { prompt, max_tokens: 8, temperature: 0 });
    expect(response.status).toBe(200);
    expect(response.headers.get('x-request-id')).toMatch(/^[0-9a-f-]{36}$/);
    const { requestId } = at.engine.seen[0]!.request;
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
    const { sender, sentNumber, ...request } = at.engine.seen[0]!.request;
    expect(request).toEqual(greedy({ requestId, promptTokenIds: ids(prompt), maxTokens: 8 }));
    expect([sender, sentNumber]).toEqual([expect.stringMatching(/^[0-9a-f]{16}$/), 1]);
  });

  it('gives the generated token ids when asked to, whole and streamed, with the one that ended the answer', async () => {
    at.engine.script = say([...ids(' 34'), eos], 'stop');
    type Reply = { choices: { token_ids?: number[] }[] };
    const ask = async (part: object): Promise<Reply> =>
      (await at.post('/v1/completions', { prompt: 'a', ...part })).json() as Promise<Reply>;
    expect((await ask({ return_token_ids: true })).choices[0]!.token_ids).toEqual([...ids(' 34'), eos]);
    const response = await at.post('/v1/completions', { prompt: 'a', return_token_ids: true, stream: true });
    const chunks = (await eventsOf(response)).filter((event) => event !== '[DONE]') as Reply[];
    expect(chunks.flatMap(({ choices }) => choices[0]!.token_ids)).toEqual([...ids(' 34'), eos]);
    expect((await ask({})).choices[0]).not.toHaveProperty('token_ids');
  });

  it('has OpenAI’s defaults and passes every sampling parameter on', async () => {
    at.engine.script = say(ids(' 34'), 'length');
    await at.client.completions.create({ model: 'demo', prompt: 'a' });
    expect(at.engine.seen[0]!.request).toMatchObject({ maxTokens: 16, temperature: 1, topP: 1, topK: 0 });
    const extensions = { top_k: 7, ignore_eos: true, stop_token_ids: [9], cache_salt: 's' };
    await at.client.completions.create({
      model: 'demo',
      prompt: 'a',
      seed: -1,
      top_p: 0.5,
      temperature: 0.25,
      ...extensions,
    });
    expect(at.engine.seen[1]!.request).toMatchObject({
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
    at.engine.script = (call, request) => say(request.promptTokenIds, 'length')(call);
    const answers = at.watchAnswers();
    const several = await at.client.completions.create({ model: 'demo', prompt: [' John', ' Jane'], n: 2, seed: 5 });
    expect(several.choices.map(({ index, text }) => [index, text])).toEqual([
      [0, ' John'],
      [1, ' John'],
      [2, ' Jane'],
      [3, ' Jane'],
    ]);
    expect(several.usage).toMatchObject({ prompt_tokens: 2, completion_tokens: 4, total_tokens: 6 });
    const seeds = at.engine.seen.map(({ request }) => request.seed);
    expect(seeds[0]).toBe(5n);
    expect(new Set(seeds)).toEqual(new Set([5n, BigInt.asUintN(64, 5n + 0x9e3779b97f4a7c15n)]));
    expect((await at.client.completions.create({ model: 'demo', prompt: ids(' John Doe') })).choices[0]!.text).toBe(
      ' John Doe',
    );
    const lists = await at.client.completions.create({ model: 'demo', prompt: [ids(' John'), ids(' 34')] });
    expect(lists.choices.map(({ text }) => text)).toEqual([' John', ' 34']);
    expect(answers).toEqual([1, 1, 1, 1, ids(' John Doe').length, 1, ids(' 34').length]);
  });

  it('echoes the prompt', async () => {
    at.engine.script = say(ids(' 34'), 'length');
    const echoed = await at.client.completions.create({ model: 'demo', prompt: ids('Age:'), echo: true });
    expect(echoed.choices[0]!.text).toBe('Age: 34');
    const stream = await at.client.completions.create({ model: 'demo', prompt: 'Age:', echo: true, stream: true });
    let text = '';
    for await (const chunk of stream) text += chunk.choices[0]?.text ?? '';
    expect(text).toBe('Age: 34');
  });

  it('streams, never a half character, and usage when asked', async () => {
    at.engine.script = say(ids('é 日'), 'length', cacheUse({ cachedTokens: 1, tokensByTier: { arena: 1 } }));
    const chunks = await eventsOf(
      await at.post('/v1/completions', { prompt: 'a', stream: true, stream_options: { include_usage: true } }),
    );
    const head = {
      id: expect.stringMatching(/^cmpl-/),
      object: 'text_completion',
      created: expect.any(Number),
      model: 'demo',
    };
    const choice = (text: string, reason: string | null) => [{ index: 0, text, logprobs: null, finish_reason: reason }];
    const tokens = ids('é 日').length;
    expect(chunks).toEqual([
      { ...head, choices: choice('', null), usage: null }, // the first token, half of é
      { ...head, choices: choice('é', null), usage: null },
      { ...head, choices: choice(' ', null), usage: null },
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
    at.engine.script = (call) => {
      for (const id of ids(' 34\nQuestion: What')) call.write(event({ tokenIds: [id] })); // and never ends
    };
    const answer = await at.client.completions.create({ model: 'demo', prompt: 'a', stop: ['\nQuestion:', 'zz'] });
    expect(answer.choices[0]).toMatchObject({ text: ' 34', finish_reason: 'stop' });
    expect(answer.usage!.completion_tokens).toBe(ids(' 34\nQuestion:').length);
    await at.engine.seen[0]!.cancelled;
  });
});

describe('chat', () => {
  const messages = [
    { role: 'system' as const, content: '# Employees\n| 1 | John Doe | 29 | Engineer | Canada |' },
    { role: 'user' as const, content: [{ type: 'text' as const, text: 'What is the age of John Doe?' }] },
  ];
  const prompt = `${messages[0]!.content}\nQuestion: What is the age of John Doe?\nAnswer:`;

  it('writes the prompt by the model’s template and goes to the model’s end', async () => {
    at.engine.script = say([...ids(' 29'), eos]);
    const { id, created, ...answer } = await at.client.chat.completions.create({ model: 'demo', messages });
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
    expect(at.engine.seen[0]!.request.promptTokenIds).toEqual(ids(prompt));
    expect(at.engine.seen[0]!.request.maxTokens).toBe(4_096 - ids(prompt).length);
  });

  it('streams a role, the text and a finish reason', async () => {
    at.engine.script = say([...ids(' 29'), eos]);
    const body = { messages, stream: true, max_completion_tokens: 5 };
    const chunks = await eventsOf(await at.post('/v1/chat/completions', body));
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
    expect(at.engine.seen[0]!.request.maxTokens).toBe(5);
    const stream = at.client.chat.completions.stream({
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
    ['a foreign token', { prompt: [3_520] }, 'prompt', 'invalid_value'],
    ['usage without a stream', { stream_options: {} }, 'stream_options', 'invalid_value'],
  ])('bad parameter: %s', async (_, part, param, code) => {
    const { status, error } = await caught(at.client.completions.create({ ...completion, ...part }));
    expect(status).toBe(400);
    expect(error).toMatchObject({ type: 'invalid_request_error', param, code });
    expect((error as Error).message).toContain(param);
    expect(at.engine.seen).toHaveLength(0);
  });

  it('missing parameters are named', async () => {
    expect((await jsonOf(await at.post('/v1/completions', {}))).error).toMatchObject({ param: 'prompt' });
    expect((await jsonOf(await at.post('/v1/chat/completions', {}))).error).toMatchObject({
      param: 'messages',
      code: 'missing_required_parameter',
    });
    const image = [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'x' } }] }];
    expect((await jsonOf(await at.post('/v1/chat/completions', { messages: image }))).error).toMatchObject({
      param: 'messages[0].content',
      message: 'messages[0].content: must be a text or a list of {type: "text", text}',
    });
  });

  it('accepts what changes nothing', async () => {
    at.engine.script = say(ids(' 34'), 'length');
    const harmless = { user: 'u', metadata: {}, store: false, logit_bias: {}, presence_penalty: 0, logprobs: null };
    await at.client.completions.create({ ...completion, ...harmless, best_of: 1, suffix: null });
    const chat = { messages: [{ role: 'developer', content: 't' }], response_format: { type: 'text' }, tools: [] };
    expect((await at.post('/v1/chat/completions', { ...chat, logprobs: false, service_tier: 'auto' })).status).toBe(
      200,
    );
  });

  it('prompt too long', async () => {
    const long = caught(at.client.completions.create({ ...completion, prompt: ' 34'.repeat(4_096) }));
    expect((await long).error).toEqual({
      message:
        "This model's maximum context length is 4096 tokens. However, you requested 4097 tokens (4096 in the prompt, 1 for the completion). Shorten one of them.",
      type: 'invalid_request_error',
      param: 'prompt',
      code: 'context_length_exceeded',
    });
    const sum = await caught(at.client.completions.create({ ...completion, max_tokens: 4_096 }));
    expect(sum.error).toMatchObject({ param: 'max_tokens', code: 'context_length_exceeded' });
    const huge = await caught(at.client.completions.create({ ...completion, prompt: 'a'.repeat(5_000_000) }));
    const words = await caught(at.client.completions.create({ ...completion, prompt: ' John 1'.repeat(9_000) }));
    for (const { error } of [huge, words])
      expect(error).toMatchObject({ code: 'context_length_exceeded', message: expect.stringContaining('at least') });
    at.engine.script = fail(new KvError('TOO_LONG', 'prompt: needs 90 blocks, the pool has 10'));
    expect((await caught(at.client.completions.create(completion))).error).toMatchObject({
      code: 'context_length_exceeded',
      message: 'prompt: needs 90 blocks, the pool has 10',
    });
  });

  it('unknown model', async () => {
    for (const ask of [
      () => at.client.completions.create({ ...completion, model: 'gpt-9' }),
      () => at.client.chat.completions.create({ model: 'gpt-9', messages: [{ role: 'user', content: 'a' }] }),
      () => at.client.models.retrieve('gpt-9'),
    ]) {
      const { status, error } = await caught(ask());
      expect(status).toBe(404);
      expect(error).toMatchObject({ type: 'invalid_request_error', param: 'model', code: 'model_not_found' });
    }
  });

  it('a full queue is 429 with retry-after, also at the API server', async () => {
    at.engine.script = fail(new KvError('BUSY', 'queue: 1024 requests wait already', { retry: true }));
    const { status, error, headers } = await caught(at.client.completions.create({ ...completion, stream: true }));
    expect([status, headers!.get('retry-after')]).toEqual([429, '1']);
    expect(error).toMatchObject({ type: 'rate_limit_error', code: 'queue_full' });
    await at.open({ limits: { answersRunning: 2 } });
    expect((await caught(at.client.completions.create({ ...completion, n: 3 }))).status).toBe(429);
  });

  it('a failure in the middle of a stream is an event, and the other answers are cancelled', async () => {
    at.engine.script = (call, { requestId }) => {
      call.write(event({ tokenIds: ids(' 34') }));
      if (requestId.endsWith('-1')) fail(new KvError('IO', 'the executor failed'))(call);
    };
    const chunks = await eventsOf(await at.post('/v1/completions', { ...completion, n: 2, stream: true }));
    expect(chunks.at(-1)).toEqual({
      error: { message: 'the executor failed', type: 'server_error', param: null, code: 'io' },
    });
    await at.engine.seen.find(({ request }) => !request.requestId.endsWith('-1'))!.cancelled;
  });

  it('raw HTTP: bad JSON, no JSON, too large, unknown routes, a broken request', async () => {
    const told = async (response: Response) => [response.status, (await jsonOf(response)).error.code];
    expect(await told(await at.post('/v1/completions', '{"prompt": '))).toEqual([400, 'invalid_json']);
    expect(await told(await at.post('/v1/completions', ''))).toEqual([400, 'invalid_json']);
    expect(await told(await at.post('/v1/completions', '[]'))).toEqual([400, 'invalid_json']);
    const text = { headers: { 'content-type': 'text/plain' } };
    expect(await told(await at.post('/v1/completions', 'hi', text))).toEqual([415, 'unsupported_media_type']);
    expect(await told(await at.post('/v1/embeddings', {}))).toEqual([404, 'unknown_url']);
    expect(await told(await fetch(`${at.server.url}/v1/completions`))).toEqual([404, 'unknown_url']);
    expect(await told(await fetch(`${at.server.url}/v1/models/%zz`))).toEqual([400, 'invalid_request']);
    await at.open({ limits: { bodyBytes: 1_000 } });
    expect(await told(await at.post('/v1/completions', { prompt: 'x'.repeat(1_000) }))).toEqual([
      413,
      'request_too_large',
    ]);
    expect(await at.rawRequest('NONSENSE\r\n\r\n')).toMatch(/^HTTP\/1\.1 400 .*"code":"invalid_http"/s);
    const long = `GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ${'y'.repeat(100_000)}\r\n\r\n`;
    expect(await at.rawRequest(long)).toMatch(/^HTTP\/1\.1 431 .*"code":"invalid_http"/s);
  });

  it('a body that is no UTF-8 is refused, and not another prompt', async () => {
    const body = Buffer.from('{"prompt": "\xe9", "model": "demo"}', 'latin1');
    const init = { method: 'POST', headers: { 'content-type': 'application/json' }, body };
    const response = await fetch(`${at.server.url}/v1/completions`, init);
    expect([response.status, (await jsonOf(response)).error.code]).toEqual([400, 'invalid_json']);
    expect(at.engine.seen).toEqual([]);
  });

  it.each<[string, number[], string]>([
    ['gives more tokens than were asked for', ids(' 34 34 34 34 34 34'), 'length'],
    ['ends an answer as none can end', ids(' 34'), 'abort'],
  ])('an engine that %s gave no answer', async (_, tokenIds, finishReason) => {
    at.engine.script = (call) => {
      call.write(event({ tokenIds, finishReason }));
      call.end();
    };
    const { status, error } = await caught(at.client.completions.create({ ...completion, max_tokens: 3 }));
    expect([status, (error as { code: string }).code]).toEqual([500, 'protocol']);
  });

  it('nonsense behind a request is no part of its answer', async () => {
    at.engine.script = (call) => void call.write(event({ tokenIds: ids(' 34') }));
    const body = JSON.stringify({ ...completion, stream: true });
    const head = 'POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n';
    const socket = connect(Number(new URL(at.server.url).port), '127.0.0.1');
    let answer = '';
    const ended = new Promise((resolve) => socket.on('error', () => {}).on('close', resolve));
    const begun = new Promise<void>((resolve) =>
      socket.on('data', (bytes) => {
        answer += bytes;
        if (answer.includes('data: ')) resolve();
      }),
    );
    socket.write(`${head}content-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`);
    await begun;
    socket.write('NONSENSE\r\n\r\n');
    await ended;
    expect(answer.match(/HTTP\/1\.1 \d+/g)).toEqual(['HTTP/1.1 200']);
    await at.engine.seen[0]!.cancelled;
  });
});

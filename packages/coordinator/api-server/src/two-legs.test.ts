/** Prefill and decode apart, over pods with OpenAI's API: what each leg is asked, what the client gets, and what either's end costs. */
import { type PodRequest, StorePod } from '@kvtier/registry/testing';
import { describe, expect, it, vi } from 'vitest';
import { jsonOf } from './testing/harness.ts';
import {
  answerTo,
  bodiesOf,
  chat,
  contentOf,
  header,
  messages,
  patience,
  textOfEvents,
  twoLegsRig,
} from './testing/two-legs-rig.ts';

const { at, store, p, p2, d, pods, open, ask, withAlso, atRest } = twoLegsRig();

describe('a request that wants its first token soon', () => {
  /** Prompt tokens that a pod has to compute before, at 2,000 a second. */
  const busy = (name: string, tokensAhead: number): void => {
    const { number } = at.fleet.workers().find((worker) => worker?.record.name === name)!;
    at.fleet.sent(number, { requestId: name, tokensAhead, blocks: 1, loadS: 0 });
  };
  const soon = { 'x-slo-ttft-ms': '2000' };

  it('is weighed by the way that it takes: split, by the prefill pod', async () => {
    await open(['p', 'd']);
    busy('d', 20_000);
    expect((await ask(chat, soon)).status).toBe(200);
    expect([p.seen.length, d.seen.length]).toEqual([1, 1]);
    busy('p', 20_000);
    const refused = await ask(chat, soon);
    expect([refused.status, Number(refused.headers.get('retry-after'))]).toEqual([429, 9]);
    expect([p.seen.length, d.seen.length]).toEqual([1, 1]);
  });

  it('of one that is not split, by the decode pod alone', async () => {
    await open(['p', 'd'], { minUncachedTokens: 1_000_000 });
    busy('p', 20_000);
    expect((await ask(chat, soon)).status).toBe(200);
    busy('d', 20_000);
    expect((await ask(chat, soon)).status).toBe(429);
    expect([p.seen.length, d.seen.length]).toEqual([0, 1]);
  });
});

describe('the two legs', () => {
  const transfer = { do_remote_decode: true, do_remote_prefill: false };
  const empty = { remote_engine_id: null, remote_block_ids: null, remote_host: null, remote_port: null };

  it('prefill gets one token and no stream, decode the body as it came with what prefill answered', async () => {
    await open(['p', 'd']);
    const streamed = { ...chat, stream: true, stream_options: { include_usage: true }, min_tokens: 3, top_n: 1 };
    const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
    const response = await ask(streamed, { 'x-request-id': 'mine', traceparent });
    expect([p, d].map(({ seen }) => seen[0]!.headers.traceparent)).toEqual([traceparent, traceparent]);
    expect(await textOfEvents(response)).toBe(answerTo(messages));
    const { stream_options: _, ...rest } = streamed;
    expect(bodiesOf(p)).toEqual([
      {
        ...{ ...rest, stream: false, max_tokens: 1, max_completion_tokens: 1, min_tokens: 0 },
        kv_transfer_params: { ...transfer, ...empty },
      },
    ]);
    expect(bodiesOf(d)).toEqual([{ ...streamed, kv_transfer_params: p.params }]);
    expect(pods.flatMap((pod) => pod.seen.map(({ headers, path }) => [headers['x-request-id'], path]))).toEqual([
      ['mine', '/v1/chat/completions'],
      ['mine', '/v1/chat/completions'],
    ]);
    expect([p.computed.length, d.computed.length]).toEqual([1, 0]);
    expect([header(response, 'worker'), header(response, 'degraded')]).toEqual(['d', null]);
    expect(header(response, 'handoff')).toMatch(
      /^split P=p; why=\d+ of \d+ tokens uncached, there \d+ ms, here \d+ ms$/,
    );
    await atRest();
  });

  it.each([undefined, null])(
    'where prefill answers %s, what links both is the store: decode gets the bytes as they came',
    async (params) => {
      await open(['p', 'd']);
      p.params = params;
      const text = `{ "model":"pods", "seed": 12345678901234567890, "prompt":"${'b'.repeat(600)}" }`;
      const response = await at.post('/v1/completions', text);
      expect([response.status, await contentOf(response)]).toEqual([200, answerTo('b'.repeat(600))]);
      expect(d.seen[0]!.body).toBe(text);
      expect(p.seen[0]!.body).toContain('"seed": 12345678901234567890');
      expect([p.computed.length, d.computed.length]).toEqual([1, 0]);
      await atRest();
    },
  );

  it('what the decode pod holds, or is short, is not split', async () => {
    await open(['p', 'd'], { clientParams: true });
    const short = await ask({ ...chat, messages: [{ role: 'user', content: 'hi' }] });
    expect(header(short, 'handoff')).toMatch(/^none; why=\d+ of \d+ tokens uncached, below 64$/);
    at.holdings.blocks[at.fleet.workers().find((worker) => worker?.record.name === 'd')!.number] = 3;
    const held = await ask();
    expect(header(held, 'handoff')).toMatch(/^none; why=\d+ of \d+ tokens uncached, below 64$/);
    expect([p.seen.length, d.seen.length, header(held, 'degraded')]).toEqual([0, 2, null]);
    const brought = await ask({ ...chat, kv_transfer_params: { do_remote_prefill: true } });
    expect(header(brought, 'handoff')).toBe('none; why=the client gives kv_transfer_params');
    await atRest();
  });

  it.each([['required'], [{ type: 'function', function: { name: 'look' } }]])(
    'tool_choice %j is not split: its first token is no whole call, and a pod fails on it',
    async (choice) => {
      await open(['p', 'd']);
      p.before = ({ body, response }) => {
        if (JSON.parse(body).tool_choice === 'auto') return false;
        response.writeHead(500).end();
        return true;
      };
      const tools = [{ type: 'function', function: { name: 'look', parameters: {} } }];
      const forced = { ...chat, tools, tool_choice: choice };
      const response = await ask(forced);
      expect([response.status, header(response, 'degraded'), p.seen.length]).toEqual([200, null, 0]);
      expect(header(response, 'handoff')).toBe('none; why=tool_choice wants a whole call, and prefill gives one token');
      store.clear();
      const below = await ask({ ...forced, cache_hit_threshold: 0.8 });
      expect([header(below, 'degraded'), p.seen.length]).toEqual([null, 0]);
      expect(await contentOf(below)).toBe(answerTo(messages));
      expect(header(below, 'handoff')).toBe('none; why=tool_choice wants a whole call, and prefill gives one token');
      expect(bodiesOf(d).map((body) => body.cache_hit_threshold)).toEqual([undefined, 0.8, 0]);
      expect(
        (await ask({ ...chat, messages: [{ role: 'user', content: 'b'.repeat(900) }], tool_choice: 'auto' })).status,
      ).toBe(200);
      expect(p.seen).toHaveLength(1);
      await atRest();
    },
  );

  it('who sends it may name the prefill pod, if it is one', async () => {
    await open(['p', 'p2', 'd']);
    const short = { ...chat, messages: [{ role: 'user', content: 'hi' }] };
    const named = await ask(short, { 'x-prefiller-host-port': new URL(p2.address).host });
    expect(header(named, 'handoff')).toBe('split P=p2; why=named by x-prefiller-host-port');
    for (const other of ['10.1.1.1:80', new URL(d.address).host, 'x', ','])
      expect(header(await ask(short, { 'x-prefiller-host-port': other }), 'handoff')).toMatch(
        /^none; why=.*; x-prefiller-host-port names no prefill pod$/,
      );
    expect([p.seen.length, p2.seen.length, d.seen.length]).toEqual([0, 1, 5]);
    // No pod is told where to call.
    for (const { headers } of pods.flatMap(({ seen }) => seen))
      expect(headers).not.toHaveProperty('x-prefiller-host-port');
    await atRest();
  });

  it('roles are those of one revision', async () => {
    await open(['p', 'd']);
    await at.workers(
      { name: 'p', kind: 'openai', address: p.address, role: 'prefill', revision: '1' },
      { name: 'd', kind: 'openai', address: d.address, role: 'decode', revision: '2' },
    );
    const response = await ask();
    expect([response.status, header(response, 'degraded'), p.seen.length]).toEqual([200, 'handoff-nobody', 0]);
  });
});

describe('prefill fails, and decode computes it', () => {
  const failing: [string, string, (request: PodRequest) => void][] = [
    ['answers 500', 'failed', ({ response }) => void response.writeHead(500).end()],
    ['is full', 'busy', ({ response }) => void response.writeHead(429).end()],
    ['refuses', 'refused', ({ response }) => void response.writeHead(400).end()],
    ['dies', 'failed', ({ response }) => void response.socket!.destroy()],
    [
      'dies in its answer',
      'failed',
      ({ response }) => {
        response.writeHead(200).write('{"choi');
        setImmediate(() => response.socket!.destroy());
      },
    ],
    ['answers no JSON', 'nonsense', ({ response }) => void response.writeHead(200).end('hello')],
    [
      'answers odd params',
      'nonsense',
      ({ response }) => void response.writeHead(200).end('{"kv_transfer_params":[1]}'),
    ],
    ['answers without an end', 'nonsense', ({ response }) => void response.writeHead(200).end('x'.repeat(2 << 20))],
    ['hangs', 'timeout', () => {}],
    ['hangs in its answer', 'timeout', ({ response }) => void response.writeHead(200).write('{')],
  ];
  it.each(failing)('%s', async (_, reason, answer) => {
    await open(['p', 'd'], { prefillMs: 300, prefillTries: 1 });
    p.before = (request) => {
      answer(request);
      return true;
    };
    const response = await ask({ ...chat, stream: true });
    expect([response.status, header(response, 'degraded')]).toEqual([200, `handoff-${reason}`]);
    expect(header(response, 'handoff')).toMatch(/^none; why=\d+ of .*; prefill: .*; try again$/);
    expect(await textOfEvents(response)).toBe(answerTo(messages));
    expect(JSON.parse(d.seen[0]!.body)).toEqual({ ...chat, stream: true });
    expect(d.computed).toHaveLength(1);
    await atRest();
  });

  it('another prefill pod is tried first', async () => {
    await open(['p', 'p2', 'd']);
    let failed = 0;
    for (const pod of [p, p2])
      pod.before = ({ response }) => {
        if (failed++ > 0) return false;
        response.writeHead(503).end();
        return true;
      };
    const response = await ask();
    expect([response.status, header(response, 'degraded'), p.seen.length, p2.seen.length]).toEqual([200, null, 1, 1]);
    expect(header(response, 'handoff')).toMatch(/^split P=p/);
    await atRest();
  });

  it('there is none that takes requests', async () => {
    await open(['p', 'd']);
    await p.stop();
    await vi.waitUntil(() => at.fleet.workers().some((worker) => worker?.state === 'silent'), patience);
    const response = await ask();
    expect([response.status, header(response, 'degraded')]).toEqual([200, 'handoff-nobody']);
  });

  it('503 where fallback is off', async () => {
    await open(['p', 'd'], { fallback: false });
    p.before = ({ response }) => {
      response.writeHead(500).end();
      return true;
    };
    const response = await ask();
    expect([response.status, (await jsonOf(response)).error.code, d.seen.length]).toEqual([503, 'handoff_failed', 0]);
    await atRest();
  });
});

describe('somebody leaves', () => {
  it.each(['during prefill', 'during decode'])(
    'the client, %s: that leg ends, and nothing is counted any more',
    async (when) => {
      await open(['p', 'd'], { prefillMs: 120_000 });
      const leg = when === 'during prefill' ? p : d;
      leg.before = () => true; // it hangs
      const abort = new AbortController();
      const asked = ask(chat, {}, { signal: abort.signal }).catch(() => undefined);
      await vi.waitUntil(() => leg.seen.length === 1, patience);
      expect(at.dispatcher.stats().given).toBe(leg === p ? 2 : 1);
      // Nothing but the client would end it: a prefill leg may take longer than this test, a decode leg as long as it likes.
      abort.abort();
      await asked;
      await leg.seen[0]!.left;
      await atRest();
      expect(d.seen).toHaveLength(leg === p ? 0 : 1);
      for (const worker of at.fleet.workers())
        if (worker) expect(worker.load).toMatchObject({ waiting: 0, tokensAhead: 0 });
    },
  );

  it('the decode pod, in mid-stream: the answer ends with an error, no other pod goes on with it, and what was computed serves the next', async () => {
    await open(['p', 'd']);
    const other = new StorePod(store, 'pods');
    await other.start();
    try {
      await withAlso(other);
      const begun: PodRequest[] = [];
      for (const pod of [d, other])
        pod.before = (request) => {
          if (begun.length > 0) return false;
          begun.push(request);
          request.response.writeHead(200, { 'content-type': 'text/event-stream' });
          request.response.write('data: {"choices":[{"text":"a"}]}\n\n');
          return true;
        };
      const response = await ask({ ...chat, stream: true });
      const reader = response.body!.getReader();
      await reader.read();
      begun[0]!.response.socket!.destroy();
      expect(Buffer.from((await reader.read()).value!).toString()).toMatch(/^data: \{"error":.*\}\n\n$/);
      expect((await reader.read()).done).toBe(true);
      await atRest();
      expect([p.seen.length, d.seen.length + other.seen.length]).toEqual([1, 1]);
      const next = await ask({ ...chat, stream: true });
      expect(await textOfEvents(next)).toBe(answerTo(messages));
      expect([p.computed.length, d.computed.length + other.computed.length]).toEqual([p.seen.length, 0]);
      await atRest();
      for (const worker of at.fleet.workers())
        if (worker) expect(worker.load).toMatchObject({ waiting: 0, tokensAhead: 0 });
    } finally {
      await other.stop();
    }
  });

  it('the prefill pod, while decode streams: the stream does not notice', async () => {
    await open(['p', 'd']);
    let decoding: PodRequest | undefined;
    d.before = (request) => {
      decoding = request;
      request.response.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: 1\n\n');
      return true;
    };
    const response = await ask({ ...chat, stream: true });
    const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
    expect((await reader.read()).value).toBe('data: 1\n\n');
    await p.stop();
    await vi.waitUntil(
      () => at.fleet.workers().some((worker) => worker?.record.name === 'p' && worker.state !== 'ready'),
      patience,
    );
    decoding!.response.end('data: [DONE]\n\n');
    expect((await reader.read()).value).toBe('data: [DONE]\n\n');
    expect((await reader.read()).done).toBe(true);
    await atRest();
  });

  it('the decode pod, between the legs, and the next is of another revision: it gets nothing of prefill’s', async () => {
    await open(['p', 'd']);
    const other = new StorePod(new Set(), 'pods');
    await other.start();
    try {
      await at.workers(
        { name: 'p', kind: 'openai', address: p.address, role: 'prefill', revision: '1' },
        { name: 'd', kind: 'openai', address: d.address, role: 'decode', revision: '1' },
        { name: 'other', kind: 'openai', address: other.address, role: 'decode', revision: '2' },
      );
      const numberOf = (name: string) => at.fleet.workers().find((worker) => worker?.record.name === name)!.number;
      at.holdings.blocks[numberOf('d')] = 1; // it is asked first
      d.before = ({ response }, isPrefill) => {
        if (!isPrefill) response.socket!.destroy();
        return !isPrefill;
      };
      const response = await ask();
      expect([response.status, await contentOf(response)]).toEqual([200, answerTo(messages)]);
      expect([p.seen.length, d.seen.length]).toEqual([1, 1]);
      expect(bodiesOf(d)[0]!.kv_transfer_params).toEqual(p.params);
      expect(bodiesOf(other)).toEqual([chat]);
      expect(header(response, 'degraded')).toBe('handoff-revision, retried');
      expect(header(response, 'handoff')).toBe('none; why=prefill was of revision 1, the decode pod is of 2');
      await atRest();
    } finally {
      await other.stop();
    }
  });

  it('the decode pod, and there is no other: a prefill pod serves the whole, and its answer says so', async () => {
    await open(['p', 'p2', 'd']);
    await at.workers(
      ...[p, p2].map((pod, i) => ({
        ...{ name: ['p', 'p2'][i]!, kind: 'openai' as const, address: pod.address },
        role: 'prefill' as const,
      })),
    );
    const response = await ask();
    expect([response.status, await contentOf(response)]).toEqual([200, answerTo(messages)]);
    expect([p.seen.length + p2.seen.length, d.seen.length]).toEqual([1, 0]);
    expect(header(response, 'degraded')).toBe('handoff-no-decode-worker');
    expect(header(response, 'handoff')).toBe('none; why=no decode pod takes requests');
    await atRest();
  });
});

it('how fast a pod computes is learned from legs and from streams, not from whole answers', async () => {
  const rateOf = (name: string) => at.fleet.workers().find((worker) => worker?.record.name === name)!.prefillRate;
  const askAll = async (body: object): Promise<void> => {
    for (let i = 0; i < 3; i++) {
      const content = `${i} ${JSON.stringify(body)} ${'a long prompt '.repeat(200)}`;
      await (await ask({ ...chat, ...body, messages: [{ role: 'user', content }] })).text();
      await atRest();
    }
  };
  await open(['p', 'd']);
  await askAll({ stream: true });
  expect([rateOf('p'), rateOf('d'), p.seen.length]).toEqual(['measured', 'assumed', 3]);
  await open(['d']);
  await askAll({});
  expect(rateOf('d')).toBe('assumed');
  await askAll({ stream: true });
  expect(rateOf('d')).toBe('measured');
});

describe('what the decode pod holds', () => {
  it.each(['/v1/chat/completions', '/v1/completions'])(
    '%s: below cache_hit_threshold prefill is run, and decode asked again',
    async (path) => {
      await open(['p', 'd']);
      for (const stream of [false, true]) {
        store.clear();
        for (const pod of pods) pod.seen.length = 0;
        const body = { model: 'pods', ...(path.includes('chat') ? { messages } : { prompt: 'long' }), stream };
        const response = await ask({ ...body, cache_hit_threshold: 0.8 });
        const text = await (stream ? textOfEvents(response) : contentOf(response));
        expect(text).toBe(answerTo(path.includes('chat') ? messages : 'long'));
        expect(bodiesOf(d)).toEqual([
          { ...body, cache_hit_threshold: 0.8 },
          { ...body, cache_hit_threshold: 0, kv_transfer_params: p.params },
        ]);
        expect(bodiesOf(p)).toMatchObject([{ cache_hit_threshold: 0, max_tokens: 1, stream: false }]);
        expect(header(response, 'handoff')).toBe('split P=p; why=the decode pod held less than cache_hit_threshold');
        // Held now: decode alone, and the answer as it comes.
        const again = await ask({ ...body, cache_hit_threshold: 0.8 });
        expect(await (stream ? textOfEvents(again) : contentOf(again))).toBe(text);
        expect([p.seen.length, d.seen.length]).toEqual([1, 3]);
      }
      await atRest();
    },
  );

  it('a stream that says so and goes on is left', async () => {
    await open(['p', 'd']);
    d.before = ({ response }) => {
      if (d.seen.length > 1) return false;
      const choice = { index: 0, delta: {}, finish_reason: 'cache_threshold' };
      response.writeHead(200, { 'content-type': 'text/event-stream' });
      return response.write(`data: ${JSON.stringify({ choices: [choice] })}\n\n`);
    };
    expect(await textOfEvents(await ask({ ...chat, stream: true, cache_hit_threshold: 0.8 }))).toBe(answerTo(messages));
    await d.seen[0]!.left;
    await atRest();
  });

  it('below cache_hit_threshold without a prefill pod: decode computes it', async () => {
    await open(['p', 'd'], { prefillTries: 1 });
    p.before = ({ response }) => {
      response.writeHead(500).end();
      return true;
    };
    const response = await ask({ ...chat, cache_hit_threshold: 0.8 });
    expect([header(response, 'degraded'), await contentOf(response)]).toEqual(['handoff-failed', answerTo(messages)]);
    expect(bodiesOf(d).map((body) => body.cache_hit_threshold)).toEqual([0.8, 0]);
  });

  it('Prefer: if-available is the pod’s to answer where there is no index', async () => {
    await open(['p', 'd']);
    const known = at.holdings.match.bind(at.holdings);
    at.holdings.match = (...asked) => known(...asked).map((held) => ({ ...held, isUnknown: true }));
    const prefer = { prefer: 'if-available' };
    expect([(await ask(chat, prefer)).status, d.seen.length]).toEqual([412, 1]);
    store.add(JSON.stringify(messages));
    expect((await ask(chat, prefer)).status).toBe(200);
    await atRest();
  });

  it('Prefer: if-available is 412 where the index has not enough of it, and the pod may say so, too', async () => {
    await open(['p', 'd']);
    const prefer = { prefer: 'if-available; x=1, wait=1' };
    const refused = await ask(chat, prefer);
    expect([refused.status, (await jsonOf(refused)).error.code]).toEqual([412, 'not_held']);
    expect(header(refused, 'held')).toBe('0 blocks');
    expect(p.seen.length + d.seen.length).toBe(0);
    at.holdings.blocks[at.fleet.workers().find((worker) => worker?.record.name === 'd')!.number] = 100;
    const byPod = await ask(chat, { prefer: 'if-available' });
    expect([byPod.status, d.seen.length]).toEqual([412, 1]);
    store.add(JSON.stringify(messages));
    expect((await ask(chat, { prefer: 'if-available' })).status).toBe(200);
    await atRest();
  });
});

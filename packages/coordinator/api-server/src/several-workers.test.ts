/** Many workers behind one API server: who is tried when one fails, what a client sees of it, and that nothing stays counted anywhere. */
import { KvError } from '@kvtier/errors';
import { type Call, cacheUse, event, fail, type ScriptedEngine, say } from '@kvtier/registry/testing';
import { beforeEach, describe, expect, it, vi } from 'vitest';
import { EventStream } from './sse.ts';
import { caught, eventsOf, Harness, ids, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
let other: ScriptedEngine;
beforeEach(async () => {
  other = await at.start('b');
  await at.workers(at.named('a'), at.named('b'));
});

/** The next request goes to the first one. */
const firstHolds = (): void => {
  at.holdings.blocks[0] = 1;
};
const prompt = Array.from({ length: 40 }, (_, i) => i + 3);
const ask = (part: object = {}): Promise<Response> =>
  at.post('/v1/completions', { prompt, max_tokens: 8, temperature: 0, ...part });
type Reply = { choices: { text: string; token_ids: number[] }[]; usage: object };
/** All that was counted is counted no more. */
const atRest = (): Promise<unknown> =>
  vi.waitUntil(() => {
    const { waiting, given } = at.dispatcher.stats();
    const loads = at.fleet.workers().map((worker) => worker?.load);
    return waiting === 0 && given === 0 && loads.every((load) => !load || load.waiting + load.tokensAhead === 0);
  }, patience);
const told = async (response: Response) => {
  const { error } = await jsonOf(response);
  return [response.status, error.code, response.headers.get('retry-after')];
};

describe('before the first token', () => {
  it('says who answers, why, and what it held', async () => {
    firstHolds();
    at.engine.script = say(ids(' 34'), 'length');
    const response = await ask();
    expect(response.status).toBe(200);
    const header = (name: string) => response.headers.get(`x-kvtier-${name}`);
    expect(['worker', 'policy', 'held', 'degraded', 'retries'].map(header)).toEqual([
      'a',
      'predicted',
      '1 blocks; gpu=1',
      null,
      null,
    ]);
    expect(header('why')).toBe('ahead 0 ms, 0 waiting, 0 running, computes 24 of 40 tokens');
    await atRest();
  });

  it('one that is told to drain gets nothing new, and says what it still has', async () => {
    const drain = async (body: object | string) => {
      const answer = await at.post('/admin/drain', body);
      const { left, error } = (await answer.json()) as { left?: number; error?: { code: string; param: string } };
      return left === undefined ? [answer.status, error!.code, error!.param] : [answer.status, left];
    };
    at.engine.script = say(ids(' 34'), 'length');
    expect(await drain({ worker: 'b' })).toEqual([200, 0]);
    await vi.waitUntil(() => at.fleet.workers().some((worker) => worker?.state === 'draining'), patience);
    for (let i = 0; i < 3; i++) expect((await ask()).headers.get('x-kvtier-worker')).toBe('a');
    expect(await drain({ worker: 'b' })).toEqual([200, 0]);
    expect(await drain({ worker: 'c' })).toEqual([404, 'worker_not_found', 'worker']);
    expect(await drain({})).toEqual([400, 'missing_required_parameter', 'worker']);
    expect(await drain(`{"worker":"${'b'.repeat(5_000)}"}`)).toEqual([400, 'invalid_json', null]);
    other.alive = false;
    await vi.waitUntil(() => at.fleet.workers().some((worker) => worker?.state === 'silent'), patience);
    expect(await drain({ worker: 'b' })).toMatchObject([503, expect.any(String), null]);
  });

  it.each<[string, (call: Call) => void]>([
    ['is full', fail(new KvError('BUSY', 'queue: 1 requests wait already', { retry: true }))],
    ['ends', fail(new KvError('DISCONNECTED', 'it is closing'))],
    ['loses its GPU', fail(new KvError('GPU', 'an illegal address'))],
    ['drains', fail(new KvError('CANCELLED', 'the worker drains', { retry: true }))],
  ])('one that %s is not the last: the other has it', async (_, script) => {
    firstHolds();
    at.engine.script = script;
    other.script = say(ids(' 34'), 'length');
    const response = await ask({ stream: true });
    const header = (name: string) => response.headers.get(`x-kvtier-${name}`);
    expect(['worker', 'degraded', 'retries'].map(header)).toEqual(['b', 'retried', '1']);
    expect(await eventsOf(response)).toMatchObject([{ choices: [{ text: ' 34' }] }, '[DONE]']);
    expect([at.engine.seen.length, other.seen.length]).toEqual([1, 1]);
    expect(await at.metricsText()).toMatch(/\nkvtier_request_retries_total\{code="[A-Z]+"\} 1\n/);
    await atRest();
  });

  it('of two answers whose first fails, those who answer are named', async () => {
    at.engine.script = fail(new KvError('DISCONNECTED', 'it is closing'));
    other.script = async (call) => {
      await vi.waitUntil(() => other.seen.length === 2, patience);
      say(ids(' 34'), 'length')(call);
    };
    const response = await ask({ n: 2 });
    expect([response.status, at.engine.seen.length, other.seen.length]).toEqual([200, 1, 2]);
    expect(['worker', 'retries'].map((name) => response.headers.get(`x-kvtier-${name}`))).toEqual(['b', '1']);
    await atRest();
  });

  it('a request’s own fault is nobody else’s to repeat', async () => {
    firstHolds();
    at.engine.script = fail(new KvError('IO', 'the executor failed'));
    expect((await ask()).status).toBe(500);
    expect(other.seen).toHaveLength(0);
    await atRest();
  });

  it('429 with when to come again, when all are full', async () => {
    const busy = fail(new KvError('BUSY', 'queue: 1 requests wait already', { retry: true }));
    at.engine.script = busy;
    other.script = busy;
    expect(await told(await ask())).toEqual([429, 'queue_full', '1']);
    expect([at.engine.seen.length, other.seen.length]).toEqual([1, 1]);
    await atRest();
  });

  it('429 when all have enough to do for longer than a request may wait', async () => {
    const rates = { prefillTokensPerS: 100, stepS: 0, stepPerRequestS: 0, freedBlocksPerS: 0, loadBlocksPerS: {} };
    at.engine.load = { waiting: 1, tokensAhead: 250n, rates };
    other.load = { waiting: 1, tokensAhead: 450n, rates };
    await at.open({ routing: { maxWaitMs: 30 } });
    await at.workers(at.named('a'), at.named('b'));
    const answers = await Promise.all([ask(), ask()].map(async (response) => told(await response)));
    expect(answers).toEqual([
      [429, 'queue_full', '3'],
      [429, 'queue_full', '3'],
    ]);
    expect([at.engine.seen.length, other.seen.length]).toEqual([0, 0]);
    expect(at.dispatcher.stats()).toMatchObject({ waiting: 0, given: 0, saturated: 2 });
  });

  it('503 while nobody serves the model, and 200 when a worker comes', async () => {
    at.discovery.say();
    await vi.waitUntil(() => at.fleet.workers().every((worker) => worker === undefined), patience);
    expect(await told(await ask())).toEqual([503, 'engine_unavailable', '1']);
    expect((await fetch(`${at.server.url}/health`)).status).toBe(503);
    other.script = say(ids(' 34'), 'length');
    await at.workers(at.named('b'));
    await vi.waitUntil(async () => (await ask()).status === 200, patience);
    await atRest();
  });
});

describe('an answer that has begun', () => {
  const answer = ids(' 34\nQuestion: What is the é of John?');
  /** Gives `count` tokens of what is left of the answer, and then lives no more. */
  const dies =
    (count: number) =>
    (call: Call): void => {
      const at = call.request.promptTokenIds.length - prompt.length;
      for (const id of answer.slice(at, at + count)) call.write(event({ tokenIds: [id] }));
      fail(new KvError('DISCONNECTED', 'killed'))(call);
    };
  const goesOn = (call: Call): void => {
    const left = answer.slice(call.request.promptTokenIds.length - prompt.length);
    say(left, 'length', cacheUse({ cachedTokens: 99 }))(call);
  };

  it.each([1, 2, 7, answer.length - 1])('goes on elsewhere after %d tokens, as if nothing was', async (count) => {
    firstHolds();
    other.script = goesOn;
    const body = { stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    const part = { max_tokens: answer.length, temperature: 0.7, ...body };
    at.engine.script = goesOn;
    const undisturbed = (await eventsOf(await ask(part))) as object[];
    at.engine.script = dies(count);
    const response = await ask(part);
    const moved = (await eventsOf(response)) as object[];
    const plain = (events: object[]) =>
      events.map((one) => (typeof one === 'string' ? one : { ...one, id: '', created: 0, kvtier: '', usage: '' }));
    expect(plain(moved)).toEqual(plain(undisturbed));
    expect(moved.at(-2)).toMatchObject({
      usage: { prompt_tokens: prompt.length, completion_tokens: answer.length },
      kvtier: { moves: 1 },
    });
    const [before, after] = [at.engine.seen[1]!.request, other.seen[0]!.request];
    expect(after.promptTokenIds).toEqual([...prompt, ...answer.slice(0, count)]);
    expect(after.maxTokens).toBe(answer.length - count);
    expect(after.seed).toBe(before.seed);
    expect(after.seed).toBeDefined();
    const metrics = await at.metricsText();
    expect(metrics).toContain('\nkvtier_request_moves_total 1\n');
    // Of both answers; a reader waits for the move as between any two tokens.
    expect(metrics).toContain(`\nkvtier_request_time_between_tokens_seconds_count ${2 * (answer.length - 1)}\n`);
    await atRest();
  });

  it('finds a stop string of which one worker gave the first half and another the rest', async () => {
    firstHolds();
    at.engine.script = dies(ids(' 34\nQ').length);
    other.script = (call) => {
      for (const id of answer.slice(call.request.promptTokenIds.length - prompt.length))
        call.write(event({ tokenIds: [id] })); // and never ends
    };
    const { choices } = (await (await ask({ max_tokens: 30, stop: '\nQuestion:' })).json()) as Reply;
    expect(choices[0]!.text).toBe(' 34');
    await other.seen[0]!.cancelled;
    await atRest();
  });

  it('is complete when its worker dies after the last token and before saying so', async () => {
    firstHolds();
    at.engine.script = dies(4);
    const response = await ask({ max_tokens: 4, return_token_ids: true });
    const { choices } = (await response.json()) as Reply;
    expect(choices[0]).toMatchObject({ finish_reason: 'length', token_ids: answer.slice(0, 4) });
    expect(other.seen).toHaveLength(0);
  });

  it('is complete when its call breaks after the word that it was the last', async () => {
    firstHolds();
    at.engine.script = say(answer.slice(0, 2), 'length');
    // As where that word waits for a slow reader meanwhile.
    const follow = at.fleet.follow.bind(at.fleet);
    const breaks = vi.spyOn(at.fleet, 'follow').mockImplementation(async (...asked) => {
      await follow(...asked);
      throw new KvError('IO', 'the executor failed');
    });
    const response = await ask({ max_tokens: 2, return_token_ids: true });
    expect(response.status).toBe(200);
    const { choices } = (await response.json()) as Reply;
    expect(choices[0]).toMatchObject({ finish_reason: 'length', token_ids: answer.slice(0, 2) });
    expect(breaks).toHaveBeenCalledTimes(1);
    expect(other.seen).toHaveLength(0);
    await atRest();
  });

  it('moves as often as it has to, and a request that kills whoever has it ends', async () => {
    firstHolds();
    for (const engine of [at.engine, other]) engine.script = (call) => dies(1)(call);
    const part = { max_tokens: answer.length, return_token_ids: true };
    const { choices, kvtier } = (await (await ask(part)).json()) as Reply & { kvtier: object };
    expect(choices[0]!.token_ids).toEqual(answer);
    expect(kvtier).toMatchObject({ moves: answer.length - 1 });
    const before = at.engine.seen.length + other.seen.length;
    for (const engine of [at.engine, other]) engine.script = fail(new KvError('DISCONNECTED', 'killed'));
    expect(await told(await ask())).toEqual([503, 'engine_unavailable', '1']);
    expect(at.engine.seen.length + other.seen.length - before).toBe(5);
    await atRest();
  });

  it('waits for a worker when none is left', async () => {
    await at.workers(at.named('a'));
    const choose = vi.spyOn(at.dispatcher, 'choose');
    at.engine.script = async (call) => {
      call.write(event({ tokenIds: answer.slice(0, 2) }));
      await at.engine.stop();
    };
    const response = await ask({ max_tokens: answer.length, stream: true, return_token_ids: true });
    const events = eventsOf(response);
    await vi.waitUntil(() => at.fleet.workers()[0]?.state !== 'ready', patience);
    await vi.waitUntil(() => choose.mock.calls.length > 3, patience);
    const again = await at.start('a');
    again.script = goesOn;
    const all = (await events).filter((one) => one !== '[DONE]') as Reply[];
    expect(all.flatMap(({ choices }) => choices[0]?.token_ids ?? [])).toEqual(answer);
    // It is one request, however often somebody is looked for.
    expect(choose.mock.calls.filter(([{ except, isAgain }]) => except.size === 0 && !isAgain)).toHaveLength(1);
    await atRest();
  });

  it('is over when its last word waits for a slow reader and its worker is lost', async () => {
    await at.workers(at.named('a'));
    at.engine.script = (call) => {
      const isSecond = call.request.requestId.endsWith('-1');
      call.write(event(isSecond ? { tokenIds: [answer[0]!, 2], finishReason: 'stop' } : { tokenIds: [answer[0]!] }));
    };
    other.script = say(ids(' 34'), 'length');
    // As where the reader takes nothing: all is said, and what is to be awaited does not come.
    const { send } = EventStream.prototype;
    const slow = vi.spyOn(EventStream.prototype, 'send').mockImplementation(function (this: EventStream, chunks) {
      void send.call(this, chunks);
      return new Promise(() => {});
    });
    const events = ask({ n: 2, stream: true, return_token_ids: true }).then(eventsOf);
    await vi.waitUntil(() => slow.mock.calls.length === 2, patience);
    slow.mockRestore();
    await at.workers(at.named('a'), at.named('b'));
    await at.engine.stop();
    const choices = (await events).flatMap((one) => (one === '[DONE]' ? [] : (one as Reply).choices));
    const reasons = choices as unknown as { index: number; finish_reason: string | null }[];
    expect(reasons.map(({ index, finish_reason }) => [index, finish_reason]).toSorted()).toEqual([
      [0, null],
      [0, 'length'],
      [1, 'stop'],
    ]);
    expect(other.seen).toHaveLength(1);
    await atRest();
  });

  it('ends with an event when no worker comes in time', async () => {
    await at.open({ limits: { retryMs: 50 } });
    at.engine.script = (call) => {
      at.engine.script = fail(new KvError('DISCONNECTED', 'killed'));
      dies(2)(call);
    };
    expect((await eventsOf(await ask({ stream: true }))).at(-1)).toMatchObject({
      error: { code: 'engine_unavailable' },
    });
    await atRest();
  });
});

describe('a client that leaves', () => {
  it.each(['before the first token', 'in the middle', 'while its answer moves', 'in the queue'])(
    '%s: nothing of it stays',
    async (when) => {
      firstHolds();
      if (when === 'in the middle') at.engine.script = (call) => void call.write(event({ tokenIds: [5] }));
      if (when === 'while its answer moves') {
        await at.workers(at.named('a'));
        at.engine.script = (call) => {
          call.write(event({ tokenIds: [5] }));
          fail(new KvError('DISCONNECTED', 'killed'))(call);
        };
      }
      if (when === 'in the queue') {
        const rates = { prefillTokensPerS: 1, stepS: 0, stepPerRequestS: 0, freedBlocksPerS: 0, loadBlocksPerS: {} };
        for (const engine of [at.engine, other]) {
          engine.load = { waiting: 1, tokensAhead: 99n, rates };
          engine.tell();
        }
        await vi.waitUntil(() => at.fleet.workers().every((worker) => worker!.load.tokensAhead === 99), patience);
      }
      const abort = new AbortController();
      const pending = at.client.completions.create({ model: 'demo', prompt, stream: true }, { signal: abort.signal });
      const ended = (async () => {
        for await (const _ of await pending);
      })().catch(() => 'left');
      if (when === 'in the queue') await vi.waitUntil(() => at.dispatcher.stats().waiting === 1, patience);
      else await vi.waitUntil(() => at.engine.seen.length > 0, patience);
      abort.abort();
      await ended;
      for (const { cancelled } of when === 'while its answer moves' ? [] : at.engine.seen) await cancelled;
      await vi.waitUntil(() => at.dispatcher.stats().given === 0 && at.dispatcher.stats().waiting === 0, patience);
      await vi.waitUntil(async () => (await at.metricsText()).includes('kvtier_requests_running 0'), patience);
    },
  );
});

describe('several models', () => {
  beforeEach(async () => {
    await other.stop();
    at.engines.pop();
    other = await at.start('b');
    other.description = { ...other.description, model: 'other', modelDigest: 'cd'.repeat(32), maxModelTokens: 2_048 };
    await vi.waitUntil(async () => (await at.client.models.list()).data.length === 2, patience);
  });

  it('are listed, and each request goes to its own', async () => {
    expect((await at.client.models.list()).data.map(({ id }) => id).sort()).toEqual(['demo', 'other']);
    at.engine.script = say(ids(' John'), 'length');
    other.script = say(ids(' 34'), 'length');
    const textOf = async (model: string) =>
      (await at.client.completions.create({ model, prompt: 'a' })).choices[0]!.text;
    expect([await textOf('demo'), await textOf('other'), await textOf('demo')]).toEqual([' John', ' 34', ' John']);
    expect((await caught(at.client.completions.create({ model: 'x', prompt: 'a' }))).status).toBe(404);
    const { error } = await caught(at.client.completions.create({ prompt: 'a' } as never));
    expect(error).toMatchObject({ param: 'model', code: 'invalid_value' });
  });

  it('one without a worker is 503, the others go on', async () => {
    await other.stop();
    await vi.waitUntil(() => at.fleet.workers()[1]!.state === 'silent', patience);
    expect(await told(await ask({ model: 'other' }))).toEqual([503, 'engine_unavailable', '1']);
    at.engine.script = say(ids(' John'), 'length');
    expect((await ask({ model: 'demo' })).status).toBe(200);
    const health = await fetch(`${at.server.url}/health`);
    expect([health.status, await health.json()]).toMatchObject([
      200,
      {
        models: ['demo', 'other'],
        workers: [{ state: 'ready' }, { name: 'b', state: 'silent', why: expect.any(String) }],
      },
    ]);
  });

  it('an administrator’s word reaches all workers that it concerns', async () => {
    const post = async (path: string, body: object) => (await at.post(path, body)).json();
    expect(await post('/admin/reset_prefix_cache', {})).toEqual({ done: true, workers: { a: true, b: true } });
    expect(await post('/admin/pin_prefix', { model: 'other', name: 'p', prompt: [5, 6] })).toEqual({
      pinned_tokens: 2,
    });
    expect([at.engine.pins.length, other.pins.length]).toEqual([0, 1]);
    expect(await post('/admin/unpin_prefix', { model: 'other', name: 'p' })).toEqual({ done: true });
    const text = await at.metricsText();
    expect(text.match(/^# TYPE kvtier_engine_steps_total/gm)).toHaveLength(1);
    expect(text).toContain('kvtier_engine_steps_total{worker="a"} 7\nkvtier_engine_steps_total{worker="b"} 7\n');
    expect(text).toContain('kvtier_request_workers{state="ready"} 2');
  });
});

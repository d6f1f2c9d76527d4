/** Prefill and decode apart, seen by a client: two legs behind one answer, who dies when, and that nothing stays counted or open anywhere. */
import { KvError } from '@kvtier/errors';
import {
  type Call,
  cacheUse,
  decodes,
  event,
  fail,
  HandedBlocks,
  prefills,
  type ScriptedEngine,
  say,
} from '@kvtier/registry/testing';
import { beforeEach, describe, expect, it, vi } from 'vitest';
import { Harness, ids, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const answer = ids(' 34\nQuestion');
/** 100 blocks of 16 tokens and one more token. */
const prompt = Array.from({ length: 1_601 }, (_, i) => (i % 3_000) + 3);
const slow = {
  ...{ prefillTokensPerS: 1_000, stepS: 0.01, stepPerRequestS: 0.001 },
  ...{ freedBlocksPerS: 0, loadBlocksPerS: { peer: 10_000 } },
};
/** Decode workers that run streams, prefill workers that are idle: a long prompt is split. */
const [decodeLoad, idleLoad] = [
  { running: 4, rates: slow },
  { running: 0, rates: slow },
];
let blocks: HandedBlocks;
let d: ScriptedEngine;
let p: ScriptedEngine;
let q: ScriptedEngine;

const open = async (handOffs: Parameters<Harness['open']>[0] = {}): Promise<void> => {
  await at.open({ routing: { policy: 'round-robin' }, ...handOffs, handOffs: { itlMs: 100, ...handOffs?.handOffs } });
};
const named = (name: string, role: 'prefill' | 'decode' | 'both', part: object = {}) => ({
  ...at.named(name),
  ...{ role, node: `node-${name}`, ...part },
});
beforeEach(async () => {
  d = at.engine;
  p = await at.start('p');
  q = await at.start('q');
  blocks = new HandedBlocks();
  for (const engine of [d, p, q]) {
    engine.description = { ...engine.description, blockCount: 10_000n };
    engine.load = { totalBlocks: 10_000n, ...(engine === d ? decodeLoad : idleLoad) };
    engine.script = prefills(blocks, 10);
  }
  d.script = decodes(blocks, answer, { wanted: () => d.changes.at(-1)?.blocks });
  d.change = () => {
    setImmediate(() => blocks.look());
    return true;
  };
  await open();
  await at.workers(named('a', 'decode'), named('p', 'prefill'));
});

const ask = (part: object = {}, init: RequestInit = {}): Promise<Response> =>
  at.post('/v1/completions', { prompt, max_tokens: 8, temperature: 0, return_token_ids: true, ...part }, init);
const idsOf = async (response: Response) =>
  ((await response.json()) as { choices: { token_ids: number[] }[] }).choices[0]!.token_ids;
const header = (response: Response, name: string) => response.headers.get(`x-kvtier-${name}`);
/** Nothing is counted, and no call is open. */
const atRest = (): Promise<unknown> =>
  vi.waitUntil(() => {
    const { waiting, given } = at.dispatcher.stats();
    const loads = at.fleet.workers().map((worker) => worker?.load);
    const isOpen = loads.some((load) => load !== undefined && load.waiting + load.tokensAhead > 0);
    return waiting + given + at.handOffs.legs + at.handOffs.pendingBlocks === 0 && !isOpen;
  }, patience);
const metric = async (line: string) => {
  const text = await at.handOffs.metrics.text();
  return Number(new RegExp(`^${line.replaceAll(/[{}]/g, '\\$&')} (.*)$`, 'm').exec(text)?.[1] ?? 0);
};

describe('a split', () => {
  it('has the prompt computed by another worker, says so, and leaves nothing', async () => {
    const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
    const response = await ask({}, { headers: { 'content-type': 'application/json', traceparent } });
    expect(response.status).toBe(200);
    expect(header(response, 'worker')).toBe('a');
    expect(header(response, 'prefill-worker')).toBe('p');
    expect(header(response, 'degraded')).toBeNull();
    // The times count what the request has waited here; and with them, on a busy machine, what misses its target.
    expect(header(response, 'handoff')).toMatch(
      /^split P=p; blocks=100; why=sooner; computes=1600; travels=100; link=10000 blocks\/s; first token \d+ ms, between \d+ ms, misses [01]; alone \d+ ms, between \d+ ms, misses [01]$/,
    );
    expect(await idsOf(response)).toEqual(answer);
    expect(d.seen[0]!.request).toMatchObject({ handOff: { blocks: 100, deadlineMs: 60_000 }, promptTokenIds: prompt });
    expect(p.seen.map(({ request }) => request)).toMatchObject([
      { prefillOnly: { blocks: 100, draws: true }, promptTokenIds: prompt, maxTokens: 8 },
    ]);
    expect(d.seen[0]!.request.requestId).not.toBe(p.seen[0]!.request.requestId);
    expect([d, p].map(({ seen }) => seen[0]!.request.traceparent)).toEqual([traceparent, traceparent]);
    await atRest();
    expect(await metric('kvtier_handoff_decisions_total{decision="split",reason="sooner"}')).toBe(1);
    expect(await metric('kvtier_handoff_blocks_total{what="come"}')).toBe(100);
    expect(await metric('kvtier_handoff_first_token_seconds_count{decision="split",what="seen"}')).toBe(1);
  });

  it('tells what streams want between two tokens: a decode worker always, others where the request says so', async () => {
    const betweenMs = async (headers: Record<string, string> = {}) => {
      await idsOf(await ask({}, { headers: { 'content-type': 'application/json', ...headers } }));
      await atRest();
      return [d.seen.at(-1)!.request.betweenMs, p.seen.at(-1)!.request.betweenMs];
    };
    expect(await betweenMs()).toEqual([100, undefined]);
    expect(await betweenMs({ 'x-slo-tpot-ms': '79.5' })).toEqual([80, undefined]);
    await at.workers(named('a', 'both'), named('p', 'prefill'));
    expect(await betweenMs()).toEqual([undefined, undefined]);
    expect(await betweenMs({ 'x-slo-tpot-ms': '60' })).toEqual([60, undefined]);
  });

  it('asks the prefill worker only once the decode worker has its room', async () => {
    const gate = new HandedBlocks();
    d.script = async (call) => {
      await gate.until(() => gate.count > 0);
      await decodes(blocks, answer)(call);
    };
    const response = ask();
    await vi.waitUntil(() => d.seen.length === 1, patience);
    // The prefill worker is counted on already: the next request knows of it.
    expect(at.fleet.workers()[1]!.load).toMatchObject({ waiting: 1, tokensAhead: 1_600 });
    expect(p.seen).toHaveLength(0);
    gate.count = 1;
    expect(await idsOf(await response)).toEqual(answer);
    expect(p.seen).toHaveLength(1);
    await atRest();
  });

  it('asks nobody for what the decode worker holds itself', async () => {
    d.script = decodes(blocks, answer, { local: 100 });
    expect(await idsOf(await ask())).toEqual(answer);
    expect(p.seen).toHaveLength(0);
    await atRest();
  });
});

describe('the first token of a split', () => {
  const later = Number.POSITIVE_INFINITY;
  /** The decode side: has room at once, and answers when the gate is open. */
  const waits = (gate: HandedBlocks, then: (call: Call) => unknown) => async (call: Call) => {
    let cancelled = false;
    call.once('cancelled', () => {
      cancelled = true;
      gate.look();
    });
    call.write(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
    await gate.until(() => cancelled || gate.count > 0);
    if (!cancelled) await then(call);
  };
  const cached = cacheUse({ promptTokens: prompt.length, cachedTokens: 1_600 });
  /** A streamed answer's tokens; when the first ones have been read, `onFirst` is told them. */
  const streamed = async (onFirst: (ids: readonly number[]) => void): Promise<readonly number[]> => {
    const reader = (await ask({ stream: true, max_tokens: answer.length })).body!.getReader();
    const decoder = new TextDecoder();
    let text = '';
    const given = (): number[] =>
      [...text.matchAll(/^data: (\{.*\})$/gm)]
        .map(([, json]) => JSON.parse(json!) as { choices: { token_ids?: number[] }[] })
        .flatMap(({ choices }) => choices[0]?.token_ids ?? []);
    for (let isFirst = true, next = await reader.read(); !next.done; next = await reader.read()) {
      text += decoder.decode(next.value);
      if (isFirst) onFirst(given());
      isFirst = false;
    }
    return given();
  };

  it('is given when the prefill worker has drawn it; the decode worker’s is the same, and not given again', async () => {
    p.script = prefills(blocks, 10, later, answer[0]);
    const gate = new HandedBlocks();
    d.script = waits(gate, say(answer, 'length', cached));
    const all = await streamed((first) => {
      expect(first).toEqual([answer[0]]);
      gate.count = 1;
    });
    expect(all).toEqual(answer);
    await atRest();
  });

  it('brings what was cached with the decode worker’s', async () => {
    p.script = prefills(blocks, 10, later, answer[0]);
    d.script = waits(blocks, say(answer, 'length', cached));
    const { usage } = (await (await ask()).json()) as { usage: object };
    expect(usage).toMatchObject({
      completion_tokens: answer.length,
      prompt_tokens_details: { cached_tokens: 1_600 },
    });
    await atRest();
  });

  it('ends the answer where it is its last: the decode worker’s call ends', async () => {
    p.script = prefills(blocks, 10, later, answer[0], 'stop');
    d.script = waits(new HandedBlocks(), () => {});
    const response = await ask();
    expect([response.status, header(response, 'degraded')]).toEqual([200, null]);
    expect(await idsOf(response)).toEqual([answer[0]]);
    await d.seen[0]!.cancelled;
    await atRest();
  });

  it.each<[string, (call: Call) => void]>([
    ['draws another one', say([answer[0]! + 1], 'length')],
    ['dies', fail(new KvError('DISCONNECTED', 'killed'))],
  ])('has the answer go on from it elsewhere, where the decode worker %s', async (_, first) => {
    const b = await at.start('b');
    b.description = { ...b.description, blockCount: 10_000n };
    b.load = { totalBlocks: 10_000n, ...decodeLoad };
    const drawn = ({ request }: Call) => answer[request.promptTokenIds.length - prompt.length];
    p.script = (call) => prefills(blocks, 10, later, drawn(call))(call);
    // Not before the coordinator has it: on a busy machine the other worker's end may come first.
    const gate = new HandedBlocks();
    d.script = waits(gate, first);
    b.script = decodes(blocks, answer.slice(1));
    await at.workers(named('a', 'decode'), named('b', 'decode'), named('p', 'prefill'));
    const all = await streamed(() => {
      gate.count = 1;
    });
    expect(all).toEqual(answer);
    expect(b.seen[0]!.request.promptTokenIds).toEqual([...prompt, answer[0]]);
    await atRest();
  });
});

describe('who dies', () => {
  beforeEach(() => at.workers(named('a', 'decode'), named('p', 'prefill'), named('q', 'prefill')));

  it.each<[string, (call: Call) => void, string]>([
    ['before its first block', (call) => fail(new KvError('DISCONNECTED', 'killed'))(call), 'prefill-died'],
    [
      'after its first blocks',
      (call) => {
        blocks.count = 20;
        call.write(event({ handOff: { localBlocks: 0, readyBlocks: 20 } }));
        fail(new KvError('GPU', 'an illegal address'))(call);
      },
      'prefill-died',
    ],
    [
      'full',
      (call) => fail(new KvError('BUSY', 'queue: 1 requests wait already', { retry: true }))(call),
      'prefill-refused',
    ],
    ['too small', (call) => fail(new KvError('TOO_LONG', 'the prompt has 9 tokens'))(call), 'prefill-refused'],
    ['of another mind', (call) => fail(new KvError('REQUEST', 'no such thing'))(call), 'prefill-refused'],
    [
      'short of room in its node',
      (call) => {
        call.write(event({ finishReason: 'prefilled', handOff: { localBlocks: 0, readyBlocks: 7 } }));
        call.end();
      },
      'prefill-short',
    ],
  ])('a prefill worker that is %s gives way to another one', async (_, script, why) => {
    p.script = script;
    const response = await ask();
    expect([header(response, 'prefill-worker'), header(response, 'degraded')]).toEqual(['q', `handoff-${why}`]);
    expect(await idsOf(response)).toEqual(answer);
    expect([p.seen.length, q.seen.length, d.changes]).toEqual([1, 1, []]);
    expect(await metric(`kvtier_handoff_shortfalls_total{reason="${why}"}`)).toBe(1);
    await atRest();
  });

  it('when all prefill workers die the decode worker computes by itself, at once', async () => {
    p.script = fail(new KvError('DISCONNECTED', 'killed'));
    q.script = p.script;
    const response = await ask();
    expect(header(response, 'degraded')).toBe('handoff-prefill-died');
    expect(await idsOf(response)).toEqual(answer);
    expect(d.changes).toMatchObject([{ requestId: d.seen[0]!.request.requestId, blocks: 0 }]);
    await atRest();
  });

  it('one that says nothing for too long is given up, and its call cancelled', async () => {
    // The other one, on a busy machine, may be late by more than a second.
    await open({ handOffs: { stallMs: 2_500 } });
    const quick = { ...slow, prefillTokensPerS: 1e6 };
    for (const engine of [p, q]) engine.load = { ...engine.load, rates: quick };
    await at.workers(named('a', 'decode'), named('p', 'prefill'), named('q', 'prefill'));
    p.script = () => {};
    const response = await ask();
    expect([header(response, 'prefill-worker'), header(response, 'degraded')]).toEqual([
      'q',
      'handoff-prefill-stalled',
    ]);
    expect(await idsOf(response)).toEqual(answer);
    await p.seen[0]!.cancelled;
    await atRest();
  });

  it('a prefill worker whose process ends and starts again under the decode worker costs nothing', async () => {
    let begun: Call | undefined;
    p.script = (call) => {
      begun = call;
      blocks.count = 20;
      call.write(event({ handOff: { localBlocks: 0, readyBlocks: 20 } }));
    };
    const response = ask();
    await vi.waitUntil(() => begun !== undefined, patience);
    await p.stop();
    expect(await idsOf(await response)).toEqual(answer);
    expect(header(await response, 'degraded')).toBe('handoff-prefill-died');
    await p.start();
    p.script = prefills(blocks, 10);
    await vi.waitUntil(() => at.fleet.workers()[1]?.state === 'ready', patience);
    await atRest();
    expect(at.handOffs.legs).toBe(0);
  });

  it('a decode worker that dies while it waits ends the leg of prefill; the next one gets a decision of its own', async () => {
    const e = await at.start('e');
    e.description = { ...e.description, blockCount: 10_000n };
    e.load = { totalBlocks: 10_000n, ...decodeLoad };
    await at.workers(named('a', 'decode'), named('e', 'decode'), named('p', 'prefill'));
    e.script = decodes(blocks, answer);
    let first: Call | undefined;
    d.script = (call) => {
      first = call;
      call.write(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
    };
    p.script = () => {};
    const response = ask();
    await vi.waitUntil(() => p.seen.length === 1, patience);
    p.script = prefills(blocks, 10);
    fail(new KvError('DISCONNECTED', 'killed'))(first!);
    expect(await idsOf(await response)).toEqual(answer);
    await p.seen[0]!.cancelled;
    expect([p.seen.length, e.seen[0]!.request.handOff?.blocks]).toEqual([2, 100]);
    await atRest();
  });

  it('a decode worker that dies in mid-stream is replaced from prompt and tokens given out, by a hand-off again', async () => {
    const e = await at.start('e');
    e.description = { ...e.description, blockCount: 10_000n };
    e.load = { totalBlocks: 10_000n, ...decodeLoad };
    await at.workers(named('a', 'decode'), named('e', 'decode'), named('p', 'prefill'));
    d.script = (call) => {
      call.write(event({ tokenIds: answer.slice(0, 2) }));
      fail(new KvError('DISCONNECTED', 'killed'))(call);
    };
    e.script = decodes(blocks, answer.slice(2));
    const response = await ask({ max_tokens: answer.length });
    expect(await idsOf(response)).toEqual(answer);
    expect(e.seen[0]!.request).toMatchObject({
      promptTokenIds: [...prompt, ...answer.slice(0, 2)],
      handOff: { blocks: 100 },
    });
    await atRest();
  });
});

describe('a client that leaves', () => {
  it.each<[string, () => void, () => boolean]>([
    ['before the decode worker has its room', () => (d.script = () => {}), () => d.seen.length === 1],
    ['while the prompt is computed', () => (p.script = () => {}), () => p.seen.length === 1],
    [
      'between the two: all is computed, and the decode worker has not begun',
      () => (d.script = (call) => void call.write(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }))),
      () => blocks.count === 100,
    ],
  ])('%s: both legs end with it', async (_, script, isThere) => {
    // Nothing else would end them in the time that a test has.
    await open({ handOffs: { stallMs: 60_000 } });
    await at.workers(named('a', 'decode'), named('p', 'prefill'));
    script();
    const leave = new AbortController();
    const response = ask({ stream: true }, { signal: leave.signal }).catch(() => undefined);
    await vi.waitUntil(isThere, patience);
    leave.abort();
    await response;
    const legs = [...d.seen, ...p.seen.filter(() => blocks.count < 100)];
    await Promise.all(legs.map(({ cancelled }) => cancelled));
    await atRest();
  });
});

describe('roles', () => {
  it('a decode worker without any prefill worker computes by itself, and says so', async () => {
    await at.workers(named('a', 'decode'));
    const response = await ask();
    expect([response.status, header(response, 'degraded')]).toEqual([200, 'handoff-no-prefill-worker']);
    expect(header(response, 'handoff')).toMatch(/^none; why=no-prefill-worker; held=0; alone \d+ ms/);
    await atRest();
  });

  it('503 in one line where fallback is off', async () => {
    await open({ handOffs: { fallback: false }, routing: { policy: 'round-robin', prefillServes: false } });
    await at.workers(named('a', 'decode'));
    const lacksPrefill = await ask();
    expect(lacksPrefill.status).toBe(503);
    expect((await jsonOf(lacksPrefill)).error).toMatchObject({
      message: 'model demo: no prefill worker can be asked (no-prefill-worker), and handoff.fallback is off; try again',
    });
    await at.workers(named('p', 'prefill'));
    const lacksDecode = await ask();
    expect(lacksDecode.status).toBe(503);
    expect((await jsonOf(lacksDecode)).error).toMatchObject({
      message: expect.stringMatching(
        /^model demo: no decode worker is ready .*1 only prefill, and handoff\.fallback is off\); try again$/,
      ),
    });
    expect([d.seen.length, p.seen.length]).toEqual([0, 0]);
  });

  it('a prefill worker serves all while no decode worker is ready', async () => {
    await at.workers(named('p', 'prefill'));
    p.script = say(answer, 'length');
    const response = await ask();
    expect([header(response, 'worker'), header(response, 'degraded')]).toEqual(['p', 'handoff-no-decode-worker']);
    expect(await idsOf(response)).toEqual(answer);
    await atRest();
  });

  it.each<[string, object, string]>([
    ['another revision', { revision: 'v2' }, 'other-revision'],
    ['no cache node', { node: null }, 'no-node'],
  ])('a prefill worker of %s is not asked', async (_, part, why) => {
    await at.workers(named('a', 'decode'), named('p', 'prefill', part));
    const response = await ask();
    expect(header(response, 'degraded')).toBe(`handoff-${why}`);
    expect(p.seen).toHaveLength(0);
  });
});

describe('admission', () => {
  it('429 with when to come again, before anything is sent, when the first token cannot be in time', async () => {
    p.load = { ...p.load, waiting: 3, tokensAhead: 8_000n };
    d.load = { ...d.load, waiting: 3, tokensAhead: 4_000n };
    await open();
    await at.workers(named('a', 'decode'), named('p', 'prefill'));
    const refused = await ask({}, { headers: { 'content-type': 'application/json', 'x-slo-ttft-ms': '2000' } });
    expect([refused.status, refused.headers.get('retry-after')]).toEqual([429, '5']); // the decode worker itself would be the first
    expect((await jsonOf(refused)).error.code).toBe('queue_full');
    expect([d.seen.length, p.seen.length]).toEqual([0, 0]);
    const served = await ask({}, { headers: { 'content-type': 'application/json', 'x-slo-ttft-ms': '20000' } });
    expect(served.status).toBe(200);
    expect(await metric('kvtier_handoff_refused_total{reason="late"}')).toBeGreaterThan(0);
    for (const engine of [d, p]) engine.tell({ waiting: 0, tokensAhead: 0n });
    for (const engine of [d, p]) engine.alive = false;
    await atRest();
  });

  it('a target that is none is refused by name', async () => {
    const response = await ask({}, { headers: { 'content-type': 'application/json', 'x-slo-ttft-ms': 'soon' } });
    expect(response.status).toBe(400);
    expect((await jsonOf(response)).error).toMatchObject({ message: expect.stringContaining('x-slo-ttft-ms') });
  });
});

it('no more legs than there may be: what is beyond them is computed by the decode worker', async () => {
  await open({ handOffs: { maxLegsPerWorker: 1 } });
  await at.workers(named('a', 'decode'), named('p', 'prefill'));
  p.script = () => {};
  const first = ask();
  await vi.waitUntil(() => p.seen.length === 1, patience);
  const second = await ask();
  expect(header(second, 'degraded')).toBe('handoff-prefill-busy');
  expect(await idsOf(second)).toEqual(answer);
  prefills(blocks, 100)(p.calls[0]!);
  expect(await idsOf(await first)).toEqual(answer);
  await atRest();
});

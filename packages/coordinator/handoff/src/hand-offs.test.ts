/** What a coordinator counts while a hand-off is under way, by scripted workers. */

import { FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import { KvError } from '@kvtier/errors';
import type { OnEvent } from '@kvtier/registry';
import { event, greedy } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import type { HandOffEngines } from './hand-off.ts';
import { HandOffs } from './hand-offs.ts';
import { NodeLinks } from './node-links.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['performance'] });
});
afterEach(() => {
  vi.useRealTimers();
});

const asked = {
  ...{ id: 'r', model: 'demo', among: undefined, tokens: 161, blockTokens: 16, maxTokens: 9, keys: new Int32Array(0) },
  ...{ session: '', arrivedMs: 0, ttftMs: undefined, itlMs: undefined, hasBegun: false, firstTokenByMs: undefined },
};

/** Nobody holds anything. */
const nothingHeld = {
  match: (_model: string, _keys: unknown, numbers: readonly number[]) =>
    numbers.map(() => ({ blocks: 0, byMedium: new Int32Array(8) })),
};

it('a request whose first token the prefill side gave waits at the decode side until that has one', async () => {
  const workers = new FakeWorkers();
  const [decode] = [workers.add('d'), workers.add('p')];
  for (const [at, role] of (['decode', 'prefill'] as const).entries())
    Object.assign(workers.all[at]!, { record: recordOf(`${role}`, { role, node: `n${at}` }) });
  const streams = new Map<number, { onEvent: OnEvent; end: () => void }>();
  const engines = {
    workers: () => workers.all,
    onChange: () => () => {},
    onLoad: () => () => {},
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: (number: number, _: GenerateRequest, signal: AbortSignal, onEvent: OnEvent) =>
      new Promise<void>((resolve) => {
        streams.set(number, { onEvent, end: resolve });
        signal.addEventListener('abort', () => resolve(), { once: true });
      }),
  } as unknown as HandOffEngines;
  const holdings = { match: () => [] };
  const logger = createLogger('test', 'silent');
  const handOffs = new HandOffs({ engines, holdings, logger, limits: { split: 'always', itlMs: 10_000 } });
  const choice = { worker: decode!, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } };
  const given: number[] = [];
  const run = handOffs.follow(
    choice as unknown as Parameters<HandOffs['follow']>[0],
    { ...asked, arrivedMs: performance.now() },
    greedy({ requestId: 'r' }),
    new AbortController().signal,
    ({ tokenIds }) => void given.push(...tokenIds),
    () => {},
  );
  const seen = async (): Promise<number> =>
    Number(
      /first_token_seconds_sum\{decision="split",what="seen"\} ([\d.]+)/.exec(await handOffs.metrics.text())?.[1] ?? 0,
    );
  const says = (number: number, part: Parameters<typeof event>[0]) => streams.get(number)!.onEvent(event(part));
  says(0, { handOff: { localBlocks: 0, readyBlocks: 0 } });
  vi.advanceTimersByTime(100);
  says(1, { tokenIds: [1] });
  expect([given, handOffs.awaiting, await seen()]).toEqual([[1], 1, 0.1]);
  vi.advanceTimersByTime(150);
  const cache = { promptTokens: 161, cachedTokens: 160, tokensByTier: {}, queueUs: 0, loadUs: 0, prefillUs: 0 };
  says(0, { tokenIds: [1, 2], cache });
  expect([given, handOffs.awaiting, await seen()]).toEqual([[1, 2], 0, 0.1]);
  streams.get(0)!.end();
  await run;
  expect([handOffs.awaiting, handOffs.legs, handOffs.pendingBlocks]).toEqual([0, 0, 0]);
});

it('who came late is a reason to refuse, not for ever: one is let in again, and shows how it is now', async () => {
  const workers = new FakeWorkers();
  const [decode, other] = [workers.add('d')!, workers.add('o')!];
  for (const { number, record } of [decode, other])
    Object.assign(workers.all[number]!, { record: recordOf(record.name, { role: 'decode' }) });
  let takesMs = 2_000;
  const engines = {
    workers: () => workers.all,
    follow: async (_: number, _request: GenerateRequest, _signal: AbortSignal, onEvent: OnEvent) => {
      vi.advanceTimersByTime(takesMs);
      onEvent(event({ tokenIds: [1], finishReason: 'length' }));
    },
  } as unknown as HandOffEngines;
  const logger = createLogger('test', 'silent');
  const handOffs = new HandOffs({ engines, holdings: { match: () => [] }, logger });
  const share = { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 };
  const ask = (ttftMs?: number, worker = decode): Promise<void> =>
    handOffs.follow(
      { worker, share } as unknown as Parameters<HandOffs['follow']>[0],
      { ...asked, arrivedMs: performance.now(), ttftMs },
      greedy({ requestId: 'r' }),
      new AbortController().signal,
      () => {},
      () => {},
    );
  for (let i = 0; i < 300; i++) await ask();
  takesMs = 1;
  await expect(ask(200)).rejects.toThrow(/its first token would come/);
  await ask(200, other); // it was not late
  vi.advanceTimersByTime(10_000);
  await ask(200);
});

it.each([
  ['no prefill pool holds', 'prefill-too-small'],
  ['no prefill node could hand on', 'no-link'],
])('without fallback a prompt that %s is the decode side’s: no later try would find another one', async (_, why) => {
  const workers = new FakeWorkers();
  const [decode] = [workers.add('d'), workers.add('p')];
  for (const [at, role] of (['decode', 'prefill'] as const).entries()) {
    const isSmall = role === 'prefill' && why === 'prefill-too-small';
    const facts = { ...workers.all[at]!.facts!, ...(isSmall && { maxTotalTokens: asked.tokens }) };
    Object.assign(workers.all[at]!, { record: recordOf(role, { role, node: `n${at}` }), facts });
  }
  const followed: number[] = [];
  const engines = {
    workers: () => workers.all,
    nodes: () => [{ name: 'n0', peer: null, events: null, ...(why === 'no-link' && { peers: ['n7'] }) }],
    follow: async (number: number, _request: GenerateRequest, _signal: AbortSignal, onEvent: OnEvent) => {
      followed.push(number);
      onEvent(event({ tokenIds: [1], finishReason: 'length' }));
    },
  } as unknown as HandOffEngines;
  const limits = { split: 'always', fallback: false } as const;
  const handOffs = new HandOffs({ engines, holdings: nothingHeld, logger: createLogger('test', 'silent'), limits });
  const choice = { worker: decode!, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } };
  const told: (string | undefined)[] = [];
  await handOffs.follow(
    choice as unknown as Parameters<HandOffs['follow']>[0],
    { ...asked, arrivedMs: performance.now() },
    greedy({ requestId: 'r' }),
    new AbortController().signal,
    () => {},
    ({ degraded }) => void told.push(degraded),
  );
  expect([followed, told]).toEqual([[0], [`handoff-${why}`]]);
});

it.each([
  ['nothing', 0],
  ['a few blocks', 10],
  ['all blocks', 512],
])('a prefill worker that holds %s of the prompt may be as late as its queue makes it', async (_, held) => {
  vi.useFakeTimers({ toFake: ['performance', 'setTimeout', 'clearTimeout'] });
  const workers = new FakeWorkers();
  const [decode] = [workers.add('d'), workers.add('p')];
  for (const [at, role] of (['decode', 'prefill'] as const).entries()) {
    const facts = { ...workers.all[at]!.facts!, maxStepTokens: 512 };
    Object.assign(workers.all[at]!, { record: recordOf(role, { role, node: `n${at}` }), facts });
  }
  // Three seconds of work before it.
  Object.assign(workers.all[1]!.load, { prefillTokensPerS: 2_000, stepS: 0.01, tokensAhead: 6_000, waiting: 2 });
  const streams = new Map<number, { onEvent: OnEvent; end: () => void; signal: AbortSignal }>();
  const engines = {
    workers: () => workers.all,
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: (number: number, _request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent) =>
      new Promise<void>((resolve, reject) => {
        streams.set(number, { onEvent, end: resolve, signal });
        signal.addEventListener('abort', () => reject(signal.reason), { once: true });
      }),
  } as unknown as HandOffEngines;
  const byMedium = (blocks: number): Int32Array => Int32Array.of(blocks, 0, 0, 0, 0, 0, 0, 0);
  const heldBy = (number: number) => ({ blocks: number === 1 ? held : 0, byMedium: byMedium(number === 1 ? held : 0) });
  const holdings = { match: (_model: string, _keys: unknown, numbers: readonly number[]) => numbers.map(heldBy) };
  const logger = createLogger('test', 'silent');
  const handOffs = new HandOffs({ engines, holdings, logger, limits: { split: 'always' } });
  const choice = { worker: decode!, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } };
  const told: (string | undefined)[] = [];
  const run = handOffs.follow(
    choice as unknown as Parameters<HandOffs['follow']>[0],
    { ...asked, tokens: 512 * 16 + 1, keys: new Int32Array(1_024), arrivedMs: performance.now() },
    greedy({ requestId: 'r' }),
    new AbortController().signal,
    () => {},
    ({ degraded }) => void told.push(degraded),
  );
  streams.get(0)!.onEvent(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
  const prefill = streams.get(1)!;
  await vi.advanceTimersByTimeAsync(3_300);
  expect(prefill.signal.aborted).toBe(false);
  prefill.onEvent(event({ handOff: { localBlocks: 0, readyBlocks: 512 }, finishReason: 'prefilled' }));
  prefill.end();
  streams.get(0)!.onEvent(event({ tokenIds: [1], finishReason: 'length' }));
  streams.get(0)!.end();
  await run;
  expect(told).toEqual([undefined]);
});

it('another prefill worker gives no first token that fills its pool', async () => {
  const workers = new FakeWorkers();
  const [decode] = [workers.add('d'), workers.add('p'), workers.add('q')];
  for (const [at, role] of (['decode', 'prefill', 'prefill'] as const).entries()) {
    const maxTotalTokens = asked.tokens + (at === 2 ? 1 : 1_000);
    const facts = { ...workers.all[at]!.facts!, maxTotalTokens };
    Object.assign(workers.all[at]!, { record: recordOf(`${role}${at}`, { role, node: `n${at}` }), facts });
  }
  // The one with the small pool is the second choice.
  Object.assign(workers.all[2]!.load, { tokensAhead: 10_000, prefillTokensPerS: 2_000 });
  const legs: [number, boolean | undefined][] = [];
  let answered = (): void => {};
  const engines = {
    workers: () => workers.all,
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: async (number: number, request: GenerateRequest, _signal: AbortSignal, onEvent: OnEvent) => {
      if (number === 0) {
        onEvent(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
        await new Promise<void>((resolve) => {
          answered = resolve;
        });
        onEvent(event({ tokenIds: [1], finishReason: 'length' }));
        return;
      }
      legs.push([number, request.prefillOnly?.draws]);
      if (legs.length === 1) throw new KvError('DISCONNECTED', 'gone', { retry: true });
      answered();
    },
  } as unknown as HandOffEngines;
  const limits = { split: 'always', itlMs: 100_000, ttftMs: 100_000 } as const;
  const handOffs = new HandOffs({ engines, holdings: nothingHeld, logger: createLogger('test', 'silent'), limits });
  const choice = { worker: decode!, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } };
  await handOffs.follow(
    choice as unknown as Parameters<HandOffs['follow']>[0],
    { ...asked, maxTokens: 5, arrivedMs: performance.now() },
    greedy({ requestId: 'r' }),
    new AbortController().signal,
    () => {},
    () => {},
  );
  expect(legs).toEqual([
    [1, true],
    [2, undefined],
  ]);
});

it('a decode side that stood still behind first tokens gives them itself, until its pauses are short again, or were forgotten', async () => {
  const workers = new FakeWorkers();
  const decode = workers.add('d')!;
  workers.add('p');
  for (const [at, role] of (['decode', 'prefill'] as const).entries())
    Object.assign(workers.all[at]!, { record: recordOf(role, { role, node: `n${at}` }) });
  let pauseMs = 500;
  let isDrawn: boolean | undefined;
  let answered = (): void => {};
  const engines = {
    workers: () => workers.all,
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: async (number: number, request: GenerateRequest, _signal: AbortSignal, onEvent: OnEvent) => {
      if (number === 0) {
        const isReady = new Promise<void>((resolve) => {
          answered = resolve;
        });
        onEvent(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
        await isReady;
        vi.advanceTimersByTime(pauseMs);
        onEvent(event({ tokenIds: [1, 2], finishReason: 'length' }));
        return;
      }
      isDrawn = request.prefillOnly?.draws ?? false;
      const ready = { handOff: { localBlocks: 0, readyBlocks: 10 } };
      onEvent(event(isDrawn ? { ...ready, tokenIds: [1] } : { ...ready, finishReason: 'prefilled' }));
      answered();
    },
  } as unknown as HandOffEngines;
  const limits = { split: 'always', itlMs: 200, ttftMs: 2_000 } as const;
  const handOffs = new HandOffs({ engines, holdings: nothingHeld, logger: createLogger('test', 'silent'), limits });
  const drawn = async (): Promise<boolean | undefined> => {
    await handOffs.follow(
      { worker: decode, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } } as unknown as Parameters<
        HandOffs['follow']
      >[0],
      { ...asked, arrivedMs: performance.now() },
      greedy({ requestId: 'r' }),
      new AbortController().signal,
      () => {},
      () => {},
    );
    return isDrawn;
  };
  expect([await drawn(), await drawn()]).toEqual([true, false]);
  expect(await handOffs.metrics.text()).toContain('kvtier_handoff_pause_seconds_sum{what="seen"} 0.5\n');
  pauseMs = 1;
  for (let i = 0; i < 20; i++) await drawn();
  expect(await drawn()).toBe(true);
  pauseMs = 500;
  for (let i = 0; i < 2; i++) await drawn();
  expect(await drawn()).toBe(false);
  vi.advanceTimersByTime(60_000);
  expect(await drawn()).toBe(true);
});

it('a first token that the prefill side gave is compared with its own prediction, and the decode side’s with the decode side’s', async () => {
  const workers = new FakeWorkers();
  const decode = workers.add('d')!;
  workers.add('p');
  for (const [at, role] of (['decode', 'prefill'] as const).entries()) {
    Object.assign(workers.all[at]!, { record: recordOf(role, { role, node: `n${at}` }) });
    Object.assign(workers.all[at]!.load, { prefillTokensPerS: 1_000, stepS: 0.01 });
  }
  // 161 tokens at the prefill side; 160 there, and a token and a step at the decode side.
  const [earlyS, plainS] = [0.161, 0.171];
  const [lateS, before] = [0.06, 0.08];
  let isGiven = true;
  let answered = (): void => {};
  const engines = {
    workers: () => workers.all,
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: async (number: number, _request: GenerateRequest, _signal: AbortSignal, onEvent: OnEvent) => {
      if (number === 0) {
        const isReady = new Promise<void>((resolve) => {
          answered = resolve;
        });
        onEvent(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
        await isReady;
        vi.advanceTimersByTime(before * 1_000);
        onEvent(event({ tokenIds: [1, 2], finishReason: 'length' }));
        return;
      }
      vi.advanceTimersByTime((plainS + lateS - before) * 1_000);
      const ready = { handOff: { localBlocks: 0, readyBlocks: 10 } };
      onEvent(event(isGiven ? { ...ready, tokenIds: [1] } : { ...ready, finishReason: 'prefilled' }));
      answered();
    },
  } as unknown as HandOffEngines;
  const limits = { split: 'always', itlMs: 10_000 } as const;
  const handOffs = new HandOffs({ engines, holdings: nothingHeld, logger: createLogger('test', 'silent'), limits });
  /** Milliseconds to the decode side's first token, as the answer's header says. */
  const predicted = async (ttftMs?: number): Promise<number> => {
    let said = '';
    await handOffs.follow(
      { worker: decode, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } } as unknown as Parameters<
        HandOffs['follow']
      >[0],
      { ...asked, arrivedMs: performance.now(), ttftMs },
      greedy({ requestId: 'r' }),
      new AbortController().signal,
      () => {},
      ({ line }) => {
        said = line;
      },
    );
    return Number(/; first token (\d+) ms/.exec(said)![1]);
  };
  const sums = async (): Promise<number[]> => {
    const text = await handOffs.metrics.text();
    return ['predicted', 'seen'].map((what) =>
      Number(new RegExp(`first_token_seconds_sum\\{decision="split",what="${what}"\\} ([\\d.]+)`).exec(text)![1]),
    );
  };
  expect(await predicted()).toBe(175); // 4 ms later, since nobody has tried
  const asSums = (count: number) =>
    [earlyS * count, (plainS + lateS - before) * count].map((s) => expect.closeTo(s, 9));
  expect(await sums()).toEqual(asSums(1));
  for (let i = 1; i < 100; i++) await predicted();
  expect(await sums()).toEqual(asSums(100));
  await expect(predicted(165)).resolves.toBeGreaterThan(0); // let in: the early token is in time
  // It was to come early, and the decode side drew it.
  isGiven = false;
  const [earlier, seenEarlier] = await sums();
  const saidMs = await predicted();
  const [now, seen] = await sums();
  expect(now! - earlier!).toBeCloseTo(saidMs / 1_000, 3);
  expect(seen! - seenEarlier!).toBeCloseTo(plainS + lateS, 9);
  await expect(predicted(165)).resolves.toBeGreaterThan(0); // one in a hundred
});

it('what nodes say of their peers is heard as they say it, and forgotten when they do not any more', () => {
  const node = (name: string, peers?: string[]) => ({ name, peer: null, events: null, ...(peers && { peers }) });
  let nodes = [node('a', ['b', 'c']), node('b')];
  const links = new NodeLinks(() => nodes);
  const told = () => ['a', 'b', 'x', null].map((name) => links.of(name) && [...links.of(name)!]);
  expect(told()).toEqual([['b', 'c'], undefined, undefined, undefined]);
  nodes = [node('a'), node('b', [])];
  expect(told()).toEqual([undefined, [], undefined, undefined]);
});

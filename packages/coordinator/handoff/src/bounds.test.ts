/** Who is let in by what is predicted and was learned, what each worker is told to keep to, and what is bounded; by scripted workers. */
import { type FakeWorker, FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import { KvError } from '@kvtier/errors';
import type { OnEvent } from '@kvtier/registry';
import { event, greedy } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import type { Asked } from './asked.ts';
import type { HandOffEngines } from './hand-off.ts';
import { type HandOffLimits, HandOffs } from './hand-offs.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['performance'] });
});
afterEach(() => {
  vi.useRealTimers();
});

const patience = { timeout: 20_000, interval: 5 };
const blocks = 10;
type Follow = (number: number, request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent) => Promise<void>;

/** A decode worker, and so many that compute prompts for it; each has a node. */
function rig(prefills: number, limits: Partial<HandOffLimits> = {}) {
  const workers = new FakeWorkers();
  const all = ['d', ...Array.from({ length: prefills }, (_, at) => `p${at}`)].map((name, at) => {
    const worker = workers.add(name);
    worker.record = recordOf(name, { role: at === 0 ? 'decode' : 'prefill', node: `n${at}` });
    return worker;
  });
  const requests: { readonly number: number; readonly request: GenerateRequest }[] = [];
  const follow: { by: Follow } = { by: async () => {} };
  const engines = {
    workers: () => workers.all,
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: (...asked: Parameters<Follow>) => {
      requests.push({ number: asked[0], request: asked[1] });
      return follow.by(...asked);
    },
  } as unknown as HandOffEngines;
  const logger = createLogger('test', 'silent');
  const handOffs = new HandOffs({ engines, holdings: { match: () => [] }, logger, limits });
  const lines: string[] = [];
  const ask = (part: Partial<Asked> = {}, signal = new AbortController().signal): Promise<void> => {
    const keys = new Int32Array(0);
    const choice = { worker: all[0]!, share: { requestId: 'r', tokensAhead: 0, blocks: 0, loadS: 0 } };
    return handOffs.follow(
      choice as unknown as Parameters<HandOffs['follow']>[0],
      {
        ...{ id: 'r', model: 'demo', among: undefined, tokens: 16 * blocks + 1, blockTokens: 16, maxTokens: 9, keys },
        ...{ session: '', arrivedMs: performance.now(), ttftMs: undefined, itlMs: undefined, hasBegun: false },
        ...part,
      },
      greedy({ requestId: 'r' }),
      signal,
      () => {},
      ({ line }) => void lines.push(line),
    );
  };
  return { all: all as FakeWorker[], handOffs, requests, follow, ask, lines };
}

/** Its one token comes after so long; what another would compute for it it has itself. */
const answeredAfter =
  (ms: number): Follow =>
  async (_, request, _signal, onEvent) => {
    if (request.handOff) onEvent(event({ handOff: { localBlocks: blocks, readyBlocks: blocks } }));
    vi.advanceTimersByTime(ms);
    onEvent(event({ tokenIds: [1], finishReason: 'length' }));
  };
/** Runs until somebody ends it. */
const endless: Follow = (_, request, signal, onEvent) => {
  if (request.handOff) onEvent(event({ handOff: { localBlocks: 0, readyBlocks: 0 } }));
  return new Promise((resolve) => signal.addEventListener('abort', () => resolve(), { once: true }));
};

it('is refused what comes too late by what its worker has to do and by what it has waited, unless it has begun', async () => {
  const { all, ask, follow } = rig(0);
  follow.by = answeredAfter(20);
  const waited = (ms: number) => ({ arrivedMs: performance.now() - ms, ttftMs: 200 });
  await ask(waited(100));
  await expect(ask(waited(190))).rejects.toMatchObject({ code: 'BUSY', retryAfterS: 1 });
  await ask({ ...waited(190), hasBegun: true });
  all[0]!.load.tokensAhead = 40_000;
  await expect(ask({ ttftMs: 1_500 })).rejects.toMatchObject({
    ...{ code: 'BUSY', retryAfterS: 3 },
    message: expect.stringMatching(/^model demo: its first token would come 25\d\d ms after the 1500 ms that it may/),
  });
  await ask({ ttftMs: 4_200 });
});

it('what came late one way says nothing of the other', async () => {
  const { all, ask, follow } = rig(1, { split: 'always' });
  follow.by = answeredAfter(2_000);
  for (let i = 0; i < 30; i++) await ask();
  follow.by = answeredAfter(20);
  await expect(ask({ ttftMs: 200 })).rejects.toMatchObject({ code: 'BUSY' });
  all[1]!.state = 'silent';
  await ask({ ttftMs: 200 });
});

it('a worker that decodes for others is told what to keep to, one of both roles only what the request says', async () => {
  const { all, ask, follow, requests } = rig(0, { itlMs: 40 });
  follow.by = answeredAfter(20);
  await ask();
  await ask({ itlMs: 20.5 });
  all[0]!.record = recordOf('d', { role: 'both' });
  await ask();
  await ask({ itlMs: 30 });
  expect(requests.map(({ request }) => request.betweenMs)).toEqual([40, 21, undefined, 30]);
});

it('who is queued for is waited for longer, and nobody beyond the deadline', async () => {
  const stallMsOf = async (tokensAhead: number): Promise<number> => {
    const { all, ask, follow, requests } = rig(1, { split: 'always', stallMs: 1_000, deadlineMs: 60_000 });
    follow.by = answeredAfter(20);
    all[1]!.load.tokensAhead = tokensAhead;
    await ask();
    return requests[0]!.request.handOff!.stallMs;
  };
  // Twice: the second worker that is asked has as long.
  const [idle, seconds, most] = [await stallMsOf(0), await stallMsOf(40_000), await stallMsOf(200_000)];
  expect(idle).toBeLessThan(2_300);
  expect(Math.abs(seconds - idle - 2 * 3 * 4_000)).toBeLessThan(300);
  expect(most).toBe(60_000);
});

it('who failed is not asked again for the same prompt', async () => {
  const { ask, follow, requests } = rig(2, { split: 'always', tries: 3 });
  let ended = (): void => {};
  follow.by = async (number, request, signal, onEvent) => {
    if (number > 0) throw new KvError('DISCONNECTED', `p${number} died`, { retry: true });
    const over = new Promise<void>((resolve) => {
      ended = resolve;
    });
    void endless(number, request, signal, onEvent);
    await over;
  };
  const asked = ask();
  await vi.waitFor(() => expect(requests.length).toBe(3), patience);
  await new Promise(setImmediate);
  ended();
  await asked;
  expect(requests.map(({ number }) => number)).toEqual([0, 1, 2]);
});

it.each([
  ['of a worker', { maxLegsPerWorker: 1 }, 1],
  ['in all', { maxLegs: 1 }, 2],
])('legs are bounded, %s', async (_, limits, prefills) => {
  const { ask, follow, handOffs, lines } = rig(prefills, { split: 'always', ...limits });
  follow.by = endless;
  const client = new AbortController();
  const first = ask({}, client.signal);
  const second = ask({}, client.signal);
  expect([handOffs.legs, ...lines.map((line) => /why=([\w-]+)/.exec(line)![1])]).toEqual([1, 'always', 'prefill-busy']);
  client.abort(new Error('left'));
  await Promise.all([first, second]);
  expect(handOffs.legs).toBe(0);
});

it('blocks that are on their way to a node are before those that come after them', async () => {
  const { all, ask, follow, handOffs, lines } = rig(2, { split: 'always' });
  all[0]!.load.loadBlocksPerS = [0, 0, 0, 10, 0, 0];
  follow.by = endless;
  const client = new AbortController();
  const asked = [ask({}, client.signal), ask({}, client.signal)];
  const [first, second] = lines.map((line) => Number(/first token (\d+) ms/.exec(line)![1]));
  // Ten blocks each, and ten a second.
  expect([handOffs.pendingBlocks, Math.round((second! - first!) / 100)]).toEqual([2 * blocks, 10]);
  client.abort(new Error('left'));
  await Promise.all(asked);
  expect(handOffs.pendingBlocks).toBe(0);
});

it.each([
  ['shares the node', 0, [10, 0]],
  ['does not share it', 40_000, [0, 10]],
])(
  'another prefill worker that %s with the decode side has as many blocks still to send as that needs',
  async (_, tokensAhead, pending) => {
    const { all, ask, follow, handOffs } = rig(2, { split: 'always' });
    // The second one is the decode side's neighbour, and the first choice where the other has more to do.
    all[2]!.record = recordOf('near', { role: 'prefill', node: 'n0' });
    all[1]!.load.tokensAhead = tokensAhead;
    all[2]!.load.tokensAhead = 10_000;
    const seen: number[] = [];
    let legs = 0;
    follow.by = async (number, request, signal, onEvent) => {
      if (number === 0) return endless(number, request, signal, onEvent);
      seen.push(handOffs.pendingBlocks);
      if (++legs === 1) throw new KvError('DISCONNECTED', 'died', { retry: true });
      return endless(number, request, signal, onEvent);
    };
    const client = new AbortController();
    const asked = ask({}, client.signal);
    await vi.waitFor(() => expect(legs).toBe(2), patience);
    expect(seen).toEqual(pending);
    client.abort(new Error('left'));
    await asked;
    expect(handOffs.pendingBlocks).toBe(0);
  },
);

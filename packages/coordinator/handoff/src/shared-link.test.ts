/** What is measured of a link to a node that several hand-offs share, by scripted workers. */
import { FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import type { OnEvent } from '@kvtier/registry';
import { event, greedy } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import type { HandOffEngines } from './hand-off.ts';
import { type HandOffLimits, HandOffs } from './hand-offs.ts';

beforeEach(() => {
  vi.useFakeTimers({ toFake: ['performance'] });
});
afterEach(() => {
  vi.useRealTimers();
});

/** A decode worker, and two that compute 100 blocks each for it; its node holds `held` of prompts that have keys. */
function rig(held: number, more: Partial<HandOffLimits> = {}) {
  const workers = new FakeWorkers();
  const [decode] = [workers.add('d'), workers.add('p'), workers.add('q')];
  for (const [at, role] of (['decode', 'prefill', 'prefill'] as const).entries())
    Object.assign(workers.all[at]!, { record: recordOf(`${role}${at}`, { role, node: `n${at}` }) });
  const streams = new Map<string, { onEvent: OnEvent; end: () => void }>();
  const engines = {
    workers: () => workers.all,
    sent: (...sent: Parameters<FakeWorkers['sent']>) => workers.sent(...sent),
    engine: () => ({ changeHandOff: async () => true, tellFirstToken: async () => true }),
    follow: (_: number, { requestId }: GenerateRequest, signal: AbortSignal, onEvent: OnEvent) =>
      new Promise<void>((resolve) => {
        streams.set(requestId, { onEvent, end: resolve });
        signal.addEventListener('abort', () => resolve(), { once: true });
      }),
  } as unknown as HandOffEngines;
  const limits = { split: 'always', itlMs: 1, ...more } as const; // no token is drawn at the prefill side
  const heldBy = (number: number) => {
    const blocks = number === 0 ? held : 0;
    return { blocks, byMedium: Int32Array.of(0, blocks, 0, 0, 0, 0, 0, 0) };
  };
  const holdings = { match: (_model: string, _keys: unknown, numbers: readonly number[]) => numbers.map(heldBy) };
  const handOffs = new HandOffs({ engines, holdings, logger: createLogger('test', 'silent'), limits });
  const lines: string[] = [];
  const follow = (id: string, keys = 0): Promise<void> =>
    handOffs.follow(
      {
        ...{ worker: decode!, share: { requestId: id, tokensAhead: 0, blocks: 0, loadS: 0 } },
      } as unknown as Parameters<HandOffs['follow']>[0],
      {
        ...{ id, model: 'demo', among: undefined, tokens: 1_601, blockTokens: 16, maxTokens: 9, session: '' },
        ...{ keys: new Int32Array(keys), arrivedMs: performance.now(), ttftMs: undefined, itlMs: undefined },
        ...{ hasBegun: false, firstTokenByMs: undefined },
      },
      greedy({ requestId: id }),
      new AbortController().signal,
      () => {},
      ({ line }) => void lines.push(line),
    );
  const says = (id: string, part: Parameters<typeof event>[0]) => streams.get(id)!.onEvent(event(part));
  const ready = (id: string, readyBlocks: number) => says(id, { handOff: { localBlocks: 0, readyBlocks } });
  const prefilled = (id: string) =>
    says(`${id}-prefill-1`, { handOff: { localBlocks: 0, readyBlocks: 100 }, finishReason: 'prefilled' });
  const cache = { promptTokens: 1_601, cachedTokens: 1_600, tokensByTier: {}, queueUs: 0, loadUs: 0, prefillUs: 0 };
  const answers = (id: string, tailUs: number) => {
    says(id, { tokenIds: [1], finishReason: 'length', cache: { ...cache, tailUs } });
    streams.get(id)!.end();
  };
  /** Blocks a second, as the next one is decided by. */
  const link = async (): Promise<string | undefined> => {
    const last = follow('last');
    answers('last', 0);
    await last;
    return /link=(\S+) blocks/.exec(lines.at(-1)!)?.[1];
  };
  return { follow, ready, prefilled, answers, link, handOffs };
}

it('transfers that share a link measure all of it, not each its part', async () => {
  const { follow, ready, prefilled, answers, link } = rig(0);
  const runs = [follow('a'), follow('b')];
  for (const id of ['a', 'b']) {
    ready(id, 0);
    prefilled(id);
  }
  // 100 blocks a second for both, ten at a time each; what came last is told a tail of half a second later.
  for (let come = 10; come < 100; come += 10) {
    vi.advanceTimersByTime(200);
    for (const id of ['a', 'b']) ready(id, come);
  }
  vi.advanceTimersByTime(700);
  for (const id of ['a', 'b']) answers(id, 500_000);
  await Promise.all(runs);
  // 91, of the other's last ten those that came in 0.2 s of 0.7, and a quarter of the way to 96, for the same reason.
  expect(await link()).toBe('93');
});

it('what a prompt has in the decode side’s own node is no part of the link, however fast it is told', async () => {
  const { follow, ready, prefilled, answers, link, handOffs } = rig(80);
  const runs = [follow('a', 200), follow('b')];
  expect(handOffs.pendingBlocks).toBe(20 + 100);
  for (const id of ['a', 'b']) ready(id, 0);
  vi.advanceTimersByTime(10);
  ready('a', 80);
  expect(handOffs.pendingBlocks).toBe(20 + 100);
  for (const id of ['a', 'b']) prefilled(id);
  // 120 blocks in 1.2 s: 20 of one, 100 of the other.
  for (let come = 10; come < 100; come += 10) {
    vi.advanceTimersByTime(120);
    if (come === 50) ready('a', 90);
    ready('b', come);
  }
  vi.advanceTimersByTime(120);
  answers('b', 0);
  answers('a', 0);
  await Promise.all(runs);
  // 110 in 1.2 s, since the other's last ten were not told yet, and a quarter of the way to 120.
  expect(await link()).toBe('94');
});

it('a node that has lost meanwhile what the index says of it measures nothing: nobody knows how much came over the link', async () => {
  const { follow, ready, prefilled, answers, link } = rig(80);
  const run = follow('a', 200);
  ready('a', 0);
  prefilled('a');
  for (let come = 10; come < 100; come += 10) {
    vi.advanceTimersByTime(100);
    ready('a', come);
  }
  vi.advanceTimersByTime(100);
  answers('a', 0);
  await run;
  expect(await link()).toBe(undefined);
});

it('however long the rest of a prompt takes behind its blocks: the link is measured by what came with these', async () => {
  const { follow, ready, prefilled, answers, link } = rig(0, { deadlineMs: 2_000 });
  const [a, b] = [follow('a'), follow('b')];
  for (const id of ['a', 'b']) {
    ready(id, 0);
    prefilled(id);
  }
  for (let come = 10; come <= 100; come += 10) {
    vi.advanceTimersByTime(200);
    ready('b', Math.min(come, 99));
    ready('a', Math.min(come, 99));
  }
  answers('b', 0);
  await b;
  // Meanwhile the link brings others ten times as many.
  const c = follow('c');
  ready('c', 0);
  prefilled('c');
  for (let come = 10; come < 100; come += 10) {
    vi.advanceTimersByTime(600);
    ready('c', come);
  }
  answers('a', 5_400_000);
  await a;
  expect(await link()).toBe('100');
  answers('c', 0);
  await c;
});

/** The stream of an engine's load: how often, what each watcher is told of its own requests, and who does not read. */
import type { EngineLoadFigures } from '@kvtier/scheduler';
import type { EngineLoad } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { LoadWatches, type WatchCall } from './load-watches.ts';

const idle: EngineLoadFigures = {
  waiting: 0,
  running: 0,
  tokensAhead: 0,
  stepTokens: 0,
  stepForS: 0,
  usedBlocks: 0,
  totalBlocks: 100,
  waitingBlocks: 0,
  loadAheadS: 0,
  prefillTokensPerS: 0,
  stepS: 0,
  stepPerRequestS: 0,
  prefillStepS: 0,
  pacingTrust: 0,
  freedBlocksPerS: 0,
  loadBlocksPerS: {},
};

/** A call whose reader reads, or not. */
class ScriptedCall implements WatchCall {
  readonly request;
  readonly told: EngineLoad[] = [];
  readonly atMs: number[] = [];
  readonly listeners = new Map<string, () => void>();
  reads = true;
  ended = false;
  failure: unknown;

  constructor(sender = '', minIntervalMs = 0) {
    this.request = { sender, minIntervalMs };
  }

  write(load: EngineLoad): boolean {
    this.told.push(load);
    this.atMs.push(performance.now());
    return this.reads;
  }

  end(): void {
    this.ended = true;
  }

  emit(_event: 'error', error: unknown): boolean {
    this.failure = error;
    return true;
  }

  on(event: string, listener: () => void): void {
    this.listeners.set(event, listener);
  }
}

let figures: EngineLoadFigures;
let draining: boolean;
let asked: number;
let watches: LoadWatches;
beforeEach(() => {
  vi.useFakeTimers();
  figures = idle;
  draining = false;
  asked = 0;
  const load = () => {
    asked++;
    return figures;
  };
  watches = new LoadWatches({ load, draining: () => draining, bootEpoch: 'epoch' });
});
afterEach(() => {
  watches.close();
  expect(vi.getTimerCount()).toBe(0);
  vi.useRealTimers();
});

const watch = (sender?: string, minIntervalMs?: number): ScriptedCall => {
  const call = new ScriptedCall(sender, minIntervalMs);
  watches.add(call);
  return call;
};
const change = (part: Partial<EngineLoadFigures>): void => {
  figures = { ...figures, ...part };
  watches.changed();
};

it('an engine that nobody watches is asked nothing', () => {
  for (let i = 0; i < 1_000; i++) watches.changed();
  vi.runAllTimers();
  expect(asked).toBe(0);
});

it('rates are told as they are, how far the engine trusts them among them', () => {
  const rates = { prefillTokensPerS: 1, prefillStepS: 2, stepS: 3, stepPerRequestS: 4, freedBlocksPerS: 5 };
  figures = { ...idle, ...rates, pacingTrust: 0.6, loadBlocksPerS: { arena: 7 } };
  expect(watch().told[0]!.rates).toEqual({ ...rates, pacingTrust: 0.6, loadBlocksPerS: { arena: 7 } });
});

it('that nothing is left to do is told at once, and once', () => {
  const call = watch();
  vi.advanceTimersByTime(100);
  change({ waiting: 1 });
  vi.advanceTimersByTime(1);
  change({ waiting: 0, running: 1 });
  vi.advanceTimersByTime(4);
  change({ running: 0 });
  change({ usedBlocks: 1 });
  vi.advanceTimersByTime(2);
  expect(call.told.slice(1)).toMatchObject([{ waiting: 1 }, { waiting: 0, running: 0 }]);
  change({ usedBlocks: 2 });
  vi.advanceTimersByTime(10);
  expect(call.told).toHaveLength(3);
  vi.advanceTimersByTime(10);
  expect(call.told).toHaveLength(4);
});

it('tells at once, at each change but at most every 20 ms, and every 250 ms as a sign of life', () => {
  const call = watch();
  expect(call.told).toMatchObject([{ bootEpoch: 'epoch', count: 1n, waiting: 0, totalBlocks: 100n, draining: false }]);
  vi.advanceTimersByTime(100);
  for (let waiting = 1; waiting <= 50; waiting++) {
    change({ waiting });
    vi.advanceTimersByTime(1);
  }
  vi.advanceTimersByTime(30);
  expect(call.told.at(-1)!.waiting).toBe(50);
  const gaps = call.atMs.slice(1).map((at, i) => at - call.atMs[i]!);
  expect(Math.min(...gaps)).toBeGreaterThanOrEqual(20);
  expect(call.told).toHaveLength(5);
  expect(call.told.map(({ count }) => count)).toEqual([1n, 2n, 3n, 4n, 5n]);
  vi.advanceTimersByTime(1_000);
  expect(call.told).toHaveLength(9);
});

it('as seldom as a watcher asks, and a change that leaves all as it was is none', () => {
  const call = watch('', 100);
  for (let waiting = 1; waiting <= 100; waiting++) {
    change({ waiting });
    vi.advanceTimersByTime(2);
  }
  expect(call.told.length).toBeLessThanOrEqual(4);
  vi.advanceTimersByTime(240);
  const before = call.told.length;
  for (let i = 0; i < 5; i++) watches.changed();
  vi.advanceTimersByTime(5);
  expect(call.told).toHaveLength(before);
  draining = true;
  watches.changed();
  vi.advanceTimersByTime(105);
  expect(call.told.at(-1)!.draining).toBe(true);
});

it('a request is named once to each watch of its sender, in the message that first counts it', () => {
  const [mine, other] = [watch('me'), watch('you')];
  vi.advanceTimersByTime(50);
  // As the service does: the engine tells of its change first.
  change({ waiting: 1 });
  watches.taken('me', 7);
  vi.advanceTimersByTime(25);
  expect(mine.told.map(({ waiting, taken }) => [waiting, taken])).toEqual([
    [0, []],
    [1, [7]],
  ]);
  expect(other.told.map(({ taken }) => taken)).toEqual([[], []]);
  change({ waiting: 2 });
  watches.taken('me', 8);
  vi.advanceTimersByTime(25);
  expect(mine.told.at(-1)!.taken).toEqual([8]);
  // A new watch is told all that is here.
  watches.over('me', 7);
  expect(watch('me').told[0]!.taken).toEqual([8]);
  watches.over('me', 8);
  expect(watch('me').told[0]!.taken).toEqual([]);
});

it('a beginning and an end are named once, in the message that first counts them so', () => {
  const [mine, other] = [watch('me'), watch('you')];
  watches.begun('me', 7); // never taken: nothing is named
  watches.over('me', 7);
  const names = (call: ScriptedCall) => call.told.slice(1).map(({ taken, begun, ended }) => [taken, begun, ended]);
  change({ waiting: 1 });
  watches.taken('me', 7);
  vi.advanceTimersByTime(25);
  change({ waiting: 0, running: 1 });
  watches.begun('me', 7);
  watches.begun('me', 7);
  vi.advanceTimersByTime(25);
  // All within one message.
  change({ running: 1 });
  watches.taken('me', 8);
  watches.begun('me', 8);
  watches.over('me', 8);
  watches.over('me', 8);
  vi.advanceTimersByTime(25);
  expect(names(mine)).toEqual([
    [[7], [], []],
    [[], [7], []],
    [[8], [8], [8]],
  ]);
  expect(names(other).flat(2)).toEqual([]);
  // A new watch is told how all that is here stands.
  watches.taken('me', 9);
  expect(watch('me').told[0]).toMatchObject({ taken: [7, 9], begun: [7], ended: [] });
  change({ running: 0 });
  watches.over('me', 7);
  vi.advanceTimersByTime(25);
  expect(names(mine).at(-1)).toEqual([[9], [], [7]]);
});

it('one who does not read is left alone until it does, and cut off when it misses too much', () => {
  const call = watch('me');
  call.reads = false;
  vi.advanceTimersByTime(50);
  change({ waiting: 1 });
  vi.advanceTimersByTime(25);
  expect(call.told).toHaveLength(2);
  for (let i = 0; i < 100; i++) watches.taken('me', i);
  vi.advanceTimersByTime(5_000);
  expect(call.told).toHaveLength(2);
  call.reads = true;
  call.listeners.get('drain')!();
  vi.advanceTimersByTime(25);
  expect(call.told).toHaveLength(3);
  expect(call.told[2]!.taken).toHaveLength(100);
  call.reads = false;
  change({ waiting: 2 });
  vi.advanceTimersByTime(25);
  for (let i = 100; i <= 65_636; i++) {
    watches.taken('me', i);
    if (i < 65_636) expect(call.failure).toBeUndefined();
  }
  expect(call.failure).toMatchObject({ details: expect.stringContaining('is not read') });
});

it('64 watch at once, one more is refused, and one that leaves makes room', () => {
  const calls = Array.from({ length: 64 }, () => watch());
  expect(watch().failure).toMatchObject({ details: 'engine: 64 watch its load already; end one' });
  calls[0]!.listeners.get('cancelled')!();
  expect(watch().failure).toBeUndefined();
  watches.close();
  expect(calls[1]!.ended).toBe(true);
});

it('tells the step that computes prompts, and when another one begins', () => {
  const call = watch();
  expect(call.told.at(-1)!.step).toBeUndefined();
  vi.advanceTimersByTime(20);
  change({ tokensAhead: 300, stepTokens: 256, stepForS: 0.001 });
  vi.advanceTimersByTime(1);
  expect(call.told.at(-1)!.step).toEqual({ tokens: 256, forS: 0.001 });
  vi.advanceTimersByTime(20);
  change({ stepTokens: 44, stepForS: 0.002 });
  vi.advanceTimersByTime(1);
  expect(call.told.at(-1)).toMatchObject({ tokensAhead: 300n, step: { tokens: 44, forS: 0.002 } });
});

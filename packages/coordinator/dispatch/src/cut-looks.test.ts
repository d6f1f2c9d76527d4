/** Looks that take several turns: whatever happens in the middle of one, nobody is forgotten, and nobody gets a worker that it may not have. */
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import type { DispatchRequest } from './choice.ts';
import { Pending } from './pending.ts';
import { nameOf, request, rig } from './testing/dispatcher-rig.ts';
import { type FakeWorker, factsOf } from './testing/fake-workers.ts';

/** The time that a look takes: timers do not run meanwhile. */
let burntMs = 0;
beforeEach(() => {
  burntMs = 0;
  vi.useFakeTimers({ toFake: ['Date', 'setTimeout', 'clearTimeout', 'setImmediate', 'clearImmediate'] });
  vi.spyOn(performance, 'now').mockImplementation(() => Date.now() + burntMs);
});
afterEach(() => {
  vi.restoreAllMocks();
  vi.useRealTimers();
});

/** From now on it takes so long to ask about one request. */
function slow(ms: number): { count: number } {
  const isMatched = Pending.prototype.isMatched;
  const asked = { count: 0 };
  vi.spyOn(Pending.prototype, 'isMatched').mockImplementation(function (this: Pending, ...args) {
    burntMs += ms;
    asked.count++;
    return isMatched.apply(this, args);
  });
  return asked;
}
const after = (ms: number) => vi.advanceTimersByTimeAsync(ms);

/** A second of work. */
const busy = { tokensAhead: 10_000, waiting: 1 };
const idle = { tokensAhead: 0, waiting: 0 };
/** Nothing to compute, and room for ten blocks. */
const almostFull = { running: 40, usedBlocks: 990, freedBlocksPerS: 1 };

/**
 * Two workers are busy, and one has room for small ones. The first request is for `d` alone, and so is a small one, for which the worker
 * with room counts as open; behind them come those that all look in vain.
 */
async function cutLook(of: Partial<DispatchRequest> = {}) {
  const { workers, dispatcher } = rig();
  const a = workers.add('a', {}, busy);
  const c = workers.add('c', {}, almostFull);
  const d = workers.add('d', {}, busy);
  const aborts: AbortController[] = [];
  const ask = (part: Partial<DispatchRequest>): { name?: string } => {
    const outcome: { name?: string } = {};
    const abort = new AbortController();
    aborts.push(abort);
    dispatcher.choose(request({ keys: new Int32Array(0), ...part }), abort.signal).then(
      (choice) => (outcome.name = nameOf(choice)),
      (error) => (outcome.name = error.message),
    );
    return outcome;
  };
  ask({ tokens: 16, among: new Set(['a']) });
  await after(1);
  const first = ask({ among: new Set(['c', 'd', 'e']), ...of });
  ask({ among: new Set(['c']) });
  const second = ask({ among: new Set(['c', 'e']) });
  await after(1);
  for (let i = 0; i < 30; i++) ask({ among: new Set(['a', 'c']) });
  await after(300);
  const asked = slow(1);
  workers.told();
  await after(3);
  expect(asked.count).toBeGreaterThan(3);
  expect(asked.count).toBeLessThan(12);
  return { workers, dispatcher, a, c, d, ask, first, second, aborts };
}

describe('in the middle of a look', () => {
  it('a worker opens for who was looked at already', async () => {
    const { workers, d, first } = await cutLook();
    Object.assign(d.load, idle);
    workers.told();
    await after(500);
    expect(first.name).toBe('d');
  });

  it('a worker joins', async () => {
    const { workers, first, second } = await cutLook();
    workers.add('e');
    await after(200); // what is known of who holds what is not that old
    expect([first.name, second.name]).toEqual(['e', 'e']);
  });

  it('a worker leaves, and one that had the worker alone is told so', async () => {
    const { workers, dispatcher, first } = await cutLook({ among: new Set(['d']) });
    workers.all[2] = undefined;
    workers.changed();
    await after(500);
    expect(first.name).toContain('none of its 2 workers');
    expect(dispatcher.stats()).toMatchObject({ waiting: 33, given: 0 });
  });

  it.each(['whole', 'prefill'] as const)('a worker turns to %s', async (turned) => {
    const { workers, d, first, ask } = await cutLook();
    const lean = (leaning: FakeWorker['leaning']): void => {
      d.leaning = leaning;
      workers.changed();
    };
    lean('prefill');
    await after(20);
    Object.assign(d.load, idle);
    if (turned === 'whole') lean(undefined);
    workers.told();
    await after(500);
    expect(first.name).toBe(turned === 'whole' ? 'd' : undefined);
    if (turned === 'whole') return;
    const another = ask({ role: 'prefill' });
    await after(10);
    expect(another.name).toBe('d');
  });

  it('a request comes for a worker that is open', async () => {
    const { workers, d, first, ask } = await cutLook({ among: new Set(['a', 'c']) });
    Object.assign(d.load, idle);
    const late = ask({ among: new Set(['d']) });
    await after(500);
    expect([late.name, first.name, workers.open[2]]).toEqual(['d', undefined, 1]);
  });

  it('all leave, and another one comes: it need not wait for news', async () => {
    const { a, c, d, ask, dispatcher, aborts } = await cutLook();
    for (const abort of aborts) abort.abort(new Error('gone'));
    for (const { load } of [a, c, d]) Object.assign(load, idle, { running: 0, usedBlocks: 0 });
    await after(60);
    const late = ask({});
    await after(100);
    expect([late.name?.length, dispatcher.stats()]).toMatchObject([1, { waiting: 0, given: 1 }]);
  });
});

/**
 * So long nobody waits for a worker that is open for it, though nothing more is told of it. Who waits for room somewhere goes first for as
 * long as going elsewhere would cost all: a prompt of 3,000 tokens at each of four workers is 1.2 s, and looks take some time themselves.
 */
const boundMs = 1_500;
const stepMs = 20;

const names = ['v', 'w', 'x', 'y'];
const among = fc.option(fc.subarray(names, { minLength: 1 }), { nil: undefined });
/** Until the next one: often less than a look that is cut. */
const waitMs = fc.oneof(fc.nat(10), fc.nat(400));
const what = fc.oneof(
  { weight: 6, arbitrary: fc.record({ op: fc.constant('ask'), among, isSmall: fc.boolean() }) },
  { weight: 4, arbitrary: fc.record({ op: fc.constantFrom('opens', 'closes'), at: fc.nat(3) }) },
  { weight: 3, arbitrary: fc.record({ op: fc.constantFrom('ends', 'aborts'), at: fc.nat(9) }) },
  { weight: 3, arbitrary: fc.record({ op: fc.constantFrom('leaves', 'reads', 'fills'), at: fc.nat(3) }) },
);
const step = fc
  .tuple(what, waitMs)
  .map(([one, waitMs]) => ({ among: undefined, isSmall: false, at: 0, ...one, waitMs }));
type Step = typeof step extends fc.Arbitrary<infer T> ? T : never;

interface Asked {
  readonly request: DispatchRequest;
  readonly abort: AbortController;
  outcomes: number;
  isGiven: boolean;
  ended: (() => void) | undefined;
  /** By worker: since when it could have had it. */
  readonly openSinceMs: (number | undefined)[];
}

/** What a dispatcher without any queue, order or slices would say: the worker could have it. */
const mayHave = ({ among, textDigest }: DispatchRequest, { state, record, facts }: FakeWorker): boolean =>
  state === 'ready' && (among?.has(record.name) ?? true) && facts!.textDigest === textDigest;
const hasPlace = ({ tokens, maxTokens }: DispatchRequest, { load, facts }: FakeWorker): boolean =>
  load.tokensAhead <= 1_000 &&
  (load.waiting + load.running === 0 || load.usedBlocks + Math.ceil((tokens + maxTokens) / 16) <= facts!.totalBlocks);

it('nobody waits for long for a worker that is open, each has one outcome, and no worker that it may not have', async () => {
  const run = async (steps: readonly Step[], tookMs: number): Promise<void> => {
    const { workers, dispatcher } = rig();
    const digest = { textDigest: '1' };
    for (const name of names) workers.add(name, digest, busy);
    const all: Asked[] = [];
    const sent = workers.sent.bind(workers);
    workers.sent = (number, share) => {
      const one = all.find(({ request: { id } }) => id === share.requestId)!;
      expect([mayHave(one.request, workers.all[number]!), one.isGiven, one.outcomes]).toEqual([true, false, 0]);
      one.isGiven = true;
      return sent(number, share);
    };
    const ask = (names: readonly string[] | undefined, isSmall: boolean): void => {
      const asked = request({
        ...digest,
        among: names && new Set(names),
        tokens: isSmall ? 16 : 3_000,
        keys: new Int32Array(0),
      });
      const one: Asked = {
        request: asked,
        abort: new AbortController(),
        outcomes: 0,
        isGiven: false,
        ended: undefined,
        openSinceMs: [],
      };
      all.push(one);
      dispatcher.choose(asked, one.abort.signal).then(
        (choice) => {
          one.outcomes++;
          one.ended = () => choice.ended();
        },
        () => one.outcomes++,
      );
    };
    slow(tookMs);
    const waits = (worker: FakeWorker, hasRoom: boolean): Asked[] =>
      all.filter(
        (one) => one.outcomes === 0 && mayHave(one.request, worker) && hasPlace(one.request, worker) === hasRoom,
      );
    const passes = async (ms: number, isTold: boolean): Promise<void> => {
      for (let left = ms; left > 0; left -= stepMs) {
        if (isTold) workers.told();
        await after(Math.min(left, stepMs));
        const nowMs = performance.now();
        for (const [number, worker] of workers.all.entries()) {
          // Who waits for room there goes first for a while, and when that is over is seen at news alone.
          const isLeft = !isTold && waits(worker!, false).length > 0;
          const open = new Set(isLeft ? [] : waits(worker!, true));
          for (const one of all) {
            one.openSinceMs[number] = open.has(one) ? (one.openSinceMs[number] ?? nowMs) : undefined;
            if (open.has(one)) expect(nowMs - one.openSinceMs[number]!).toBeLessThanOrEqual(boundMs);
          }
        }
      }
    };
    // One worker has room for small ones alone, and others look in vain at it.
    Object.assign(workers.all[0]!.load, idle, almostFull);
    ask(['w'], true);
    for (let i = 0; i < 20; i++) ask(i % 3 === 0 ? ['v', 'x'] : ['v', 'y'], false);
    for (const one of steps) {
      if (one.op === 'ask') for (let i = 0; i < 5; i++) ask(one.among, one.isSmall);
      else if (one.op === 'aborts') {
        const waiting = all.filter(({ outcomes }) => outcomes === 0);
        for (let i = one.at; i < waiting.length; i += 2) waiting[i]!.abort.abort(new Error('gone'));
      } else if (one.op === 'ends') {
        const given = all.filter(({ ended }) => ended !== undefined)[one.at];
        given?.ended?.();
        if (given !== undefined) given.ended = undefined;
      } else {
        const worker = workers.all[one.at]!;
        const open = workers.open[one.at]!;
        if (one.op === 'opens') Object.assign(worker.load, { tokensAhead: 0, usedBlocks: 0 });
        if (one.op === 'closes') worker.load.tokensAhead = 10_000 * (open + 1);
        if (one.op === 'fills') Object.assign(worker.load, { tokensAhead: 0, ...almostFull });
        if (one.op === 'leaves') worker.state = worker.state === 'ready' ? 'silent' : 'ready';
        if (one.op === 'reads') worker.facts = factsOf({ textDigest: worker.facts!.textDigest === '1' ? '2' : '1' });
        if (one.op === 'leaves' || one.op === 'reads') workers.changed();
        else workers.told();
      }
      await passes(one.waitMs, false);
    }
    await passes(2 * boundMs, false);
    await passes(2 * boundMs, true);
    await after(31_000);
    expect(all.map(({ outcomes }) => outcomes)).toEqual(all.map(() => 1));
    for (const { ended } of all) ended?.();
    expect(dispatcher.stats()).toMatchObject({ waiting: 0, given: 0 });
    dispatcher.close();
    vi.mocked(Pending.prototype.isMatched).mockRestore();
  };
  await fc.assert(
    fc.asyncProperty(fc.array(step, { minLength: 1, maxLength: 20 }), fc.integer({ min: 1, max: 4 }), run),
    {
      numRuns: 150,
    },
  );
}, 120_000);

/** What the planner makes of requests, choices and loads; time is the test's. */
import { plannerSchema } from '@kvtier/config';
import type { Dispatch, DispatchRequest } from '@kvtier/dispatch';
import { Dispatcher } from '@kvtier/dispatch';
import { FakeHoldings, FakeWorkers, recordOf } from '@kvtier/dispatch/testing';
import type { Leaning } from '@kvtier/registry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { plannerMetrics } from './metrics.ts';
import { Planner } from './planner.ts';

const never = new AbortController().signal;
let nowMs: number;
let workers: FakeWorkers;
let holdings: FakeHoldings;
let dispatcher: Dispatcher;
let planner: Planner;
let dispatch: Dispatch;
let turns: number;

function make(config: object = {}): void {
  planner = new Planner({
    workers: {
      workers: () => workers.all,
      lean: (number, leaning: Leaning | undefined) => {
        if (workers.all[number]!.leaning !== leaning) turns++;
        workers.all[number]!.leaning = leaning;
        workers.changed();
      },
    },
    config: plannerSchema.parse({ windowMs: 10_000, ...config }),
    now: () => nowMs,
  });
  dispatch = planner.watch(dispatcher);
}
beforeEach(() => {
  nowMs = 1_000_000;
  turns = 0;
  workers = new FakeWorkers();
  holdings = new FakeHoldings();
  dispatcher = new Dispatcher({ workers, holdings, policy: 'round-robin' });
});
afterEach(() => {
  planner.close();
  dispatcher.close();
});

let count = 0;
const request = (part: Partial<DispatchRequest> = {}): DispatchRequest => ({
  ...{ id: `r${count++}`, model: 'demo', among: undefined, except: new Set<string>() },
  ...{ tokens: 1_600, blockTokens: 16, maxTokens: 16, keys: new Int32Array(200), session: '' },
  ...part,
});
/** Ten requests a second, each for a second, for so long. */
async function run(seconds: number, part: Partial<DispatchRequest> = {}): Promise<void> {
  for (let tenth = 0; tenth < seconds * 10; tenth++) {
    const choice = await dispatch.choose(request(part), never);
    choice.firstToken();
    if (tenth % 5 === 0) planner.tick();
    nowMs += 100;
    choice.ended();
  }
  planner.tick();
}

describe('the load', () => {
  it('is what comes, less what is held', async () => {
    make();
    workers.add('a');
    holdings.blocks[0] = 75;
    await run(20);
    const [plan] = planner.plans();
    expect(plan).toMatchObject({ model: 'demo', isActive: true, present: { prefill: 0, decode: 0, mixed: 1 } });
    expect(plan!.load.requestsPerS).toBeCloseTo(10, 0);
    expect(plan!.load.promptTokensPerS / 1_600).toBeCloseTo(10, 0);
    expect(plan!.load.hitRatio).toBeCloseTo(0.75);
    // A quarter of 16,000 tokens a second, at 10,000 of which 80 % may be used.
    expect(plan!.prefill.needed).toBeCloseTo(0.5, 1);
    const text = await plannerMetrics(planner)();
    expect(text).toMatch(/kvtier_planner_workers_needed\{model="demo",role="prefill"\} 0\.[45]/);
    expect(text).toContain('kvtier_planner_workers_present{model="demo",role="mixed"} 1\n');
    expect(text).toContain('kvtier_planner_hit_ratio{model="demo"} 0.75\n');
  });

  it('is not taken for all new where nobody knows what is held', async () => {
    make();
    workers.add('a');
    const known = holdings.match.bind(holdings);
    holdings.match = (...asked) => known(...asked).map((held) => ({ ...held, isUnknown: true }));
    await run(5);
    holdings.match = known;
    holdings.blocks[0] = 75;
    await run(5);
    expect(planner.plans()[0]!.load.hitRatio).toBeCloseTo(0.75);
  });

  it('of answers is what workers give, and what those that come will need', async () => {
    make();
    const worker = workers.add('a', { maxRunning: 64 }, { stepS: 0.01, stepPerRequestS: 0.001, running: 10 });
    await run(20);
    const { load, decode } = planner.plans()[0]!;
    // Ten streams and one, of steps of 20 and 21 ms.
    expect(load.outputTokensPerS).toBeGreaterThan(450);
    expect(load.outputTokensPerS).toBeLessThan(600);
    expect(decode.rateTokensPerS).toBeCloseTo(800);
    worker.load.running = 0;
    nowMs += 60_000;
    planner.tick();
    nowMs += 500;
    planner.tick();
    expect(planner.plans()[0]).toMatchObject({ isActive: false, prefill: { workers: 0 }, decode: { workers: 0 } });
  });

  it.each<[string, boolean]>([
    ['who tell their length', true],
    ['who do not', false],
  ])(
    'of long answers is not taken for more while they ramp up, clients leaving meanwhile: pods %s',
    async (_, tells) => {
      make({ windowMs: 60_000 });
      const load = { prefillTokensPerS: 20_000, stepS: 0.02, stepPerRequestS: 1e-5 };
      for (const name of ['a', 'b', 'c', 'd']) workers.add(name, { maxRunning: 256 }, load);
      // Two a second, each of 3,000 tokens in 60 s; of twenty clients one leaves after 2 s.
      const streams: { readonly endS: number; end(): void }[] = [];
      let most = 0;
      for (let second = 0; second < 240; second++) {
        for (const number of [2 * second, 2 * second + 1]) {
          const choice = await dispatch.choose(request({ tokens: 200, maxTokens: 4_000 }), never);
          choice.firstToken();
          const isWhole = number % 20 !== 7;
          const answerTokens = isWhole && tells ? 3_000 : undefined;
          streams.push({ endS: second + (isWhole ? 60 : 2), end: () => choice.ended(answerTokens) });
        }
        for (const stream of streams) if (stream.endS === second) stream.end();
        for (let half = 0; half < 2; half++) {
          nowMs += 500;
          planner.tick();
        }
        const [plan] = planner.plans();
        if (plan!.isSettled) most = Math.max(most, plan!.decode.needed);
      }
      const { needed } = planner.plans()[0]!.decode;
      expect(needed).toBeGreaterThan(0.5);
      expect(most / needed).toBeLessThanOrEqual(1.3);
    },
  );

  it('is not taken for more in a lull: streams are those of the window, as answers are', () => {
    make();
    const { load } = workers.add('a', { totalBlocks: 1_000 }, { stepS: 0.02, stepPerRequestS: 0 });
    const looks = (count: number): void => {
      for (let look = 0; look < count; look++, nowMs += 500) planner.tick();
    };
    Object.assign(load, { running: 16, usedBlocks: 160 });
    looks(40);
    const { needed } = planner.plans()[0]!.decode;
    expect(needed).toBeCloseTo(1.25, 1);
    // One stream, with a long prompt.
    Object.assign(load, { running: 1, usedBlocks: 200 });
    looks(2);
    expect(planner.plans()[0]!.decode.needed / needed).toBeCloseTo(1, 1);
  });

  it('of answers that end slower than they come is as much as these will need', async () => {
    make();
    const worker = workers.add('a', { maxRunning: 64 }, { stepS: 0.01, stepPerRequestS: 0 });
    worker.load.running = 10;
    for (let tenth = 0; tenth < 200; tenth++) {
      const choice = await dispatch.choose(request(), never);
      if (tenth % 5 === 0) {
        choice.ended(500);
        planner.tick();
      }
      nowMs += 100;
    }
    planner.tick();
    expect(planner.plans()[0]!.load.outputTokensPerS / 5_000).toBeCloseTo(1, 1);
  });

  it('of answers whose length nobody tells is shared out among those alone: a prompt that another worker computes is none', async () => {
    const seen: number[] = [];
    for (const legs of [0, 8]) {
      make();
      for (const [name, running] of Object.entries({ decode: 10, prefill: legs })) {
        const role = name as 'decode' | 'prefill';
        workers.add(name, { maxRunning: 64 }, { stepS: 0.01, stepPerRequestS: 0, running }).record = recordOf(name, {
          role,
        });
      }
      workers.changed();
      for (let tenth = 0; tenth < 200; tenth++) {
        const choice = await dispatch.choose(request(), never);
        // One in five ends, so that the window has twenty of them.
        if (tenth % 5 === 0) choice.ended();
        if (tenth % 5 === 0) planner.tick();
        nowMs += 100;
      }
      planner.tick();
      seen.push(planner.plans()[0]!.load.outputTokensPerS);
      planner.close();
      workers.all.length = 0;
      nowMs = 1_000_000;
    }
    expect(seen[0]).toBeGreaterThan(1_100); // more than the ten streams give
    expect(seen[1]).toBe(seen[0]);
  });

  it('is not known before some of the window has passed, whatever runs; of a model that comes later, too', () => {
    make();
    const settled = () => planner.plans().map(({ model, isSettled }) => [model, isSettled]);
    workers.add('a', {}, { running: 3 });
    planner.tick();
    nowMs += 2_499;
    planner.tick();
    expect(settled()).toEqual([['demo', false]]);
    workers.add('b', { model: 'later' });
    nowMs += 1;
    planner.tick();
    expect(settled()).toEqual([
      ['demo', true],
      ['later', false],
    ]);
    nowMs += 2_500;
    planner.tick();
    expect(settled().map(([, is]) => is)).toEqual([true, true]);
  });

  it('reads what each worker has to do once a look', () => {
    make({ roles: 'live' });
    const reads = ['a', 'b', 'c'].map((name) => {
      const worker = workers.add(name, { maxRunning: 8 }, { running: 2, usedBlocks: 8 });
      const { load } = worker;
      const read = vi.fn(() => load);
      Object.defineProperty(worker, 'load', { get: read });
      return read;
    });
    planner.tick();
    expect(reads.map(({ mock }) => mock.calls.length)).toEqual([1, 1, 1]);
  });

  it('counts a request once, however often it is tried, and no prefill leg', async () => {
    make();
    workers.add('a');
    workers.add('p').record = recordOf('p', { role: 'prefill' });
    workers.changed();
    planner.tick();
    for (let i = 0; i < 5; i++) {
      await dispatch.choose(request(), never);
      await dispatch.choose(request({ except: new Set(['x']) }), never);
      await dispatch.choose(request({ isAgain: true }), never);
      await dispatch.choose(request({ role: 'prefill' }), never);
    }
    nowMs += 1_000;
    planner.tick();
    expect(planner.plans()[0]!.load.requestsPerS).toBeCloseTo(5);
    expect(planner.plans()[0]!.present).toEqual({ prefill: 1, decode: 0, mixed: 1 });
  });

  it('of what has no answer is none: a list of models is no request with tokens, however often it is asked for', async () => {
    const seen: unknown[] = [];
    for (const listsPerS of [0, 5]) {
      make();
      const worker = workers.add('a', { maxRunning: 64 }, { stepS: 0.01, stepPerRequestS: 0 });
      for (let second = 0; second < 20; second++) {
        for (let i = 0; i < listsPerS; i++) (await dispatch.choose(request({ hasAnswer: false }), never)).ended();
        for (let i = 0; i < 2; i++) (await dispatch.choose(request(), never)).ended(500);
        planner.tick();
        nowMs += 1_000;
      }
      planner.tick();
      const { load, decode, prefill } = planner.plans()[0]!;
      seen.push({ load, decode, prefill });
      expect(load.outputTokensPerS).toBeLessThanOrEqual(1_000);
      // Nor is a model in use that nobody asks for anything else.
      worker.load.running = 0;
      nowMs += 60_000;
      for (let i = 0; i < 5; i++) (await dispatch.choose(request({ hasAnswer: false }), never)).ended();
      planner.tick();
      expect(planner.plans()[0]!.isActive).toBe(false);
      planner.close();
      workers.all.length = 0;
      nowMs = 1_000_000;
    }
    expect(seen[1]).toEqual(seen[0]);
  });

  it('counts what finds no room, and forgets a model that is gone; names of nobody take no place', async () => {
    make();
    const worker = workers.add('a');
    planner.tick();
    worker.state = 'silent';
    workers.changed();
    for (let i = 0; i < 10; i++) {
      await expect(dispatch.choose(request(), never)).rejects.toMatchObject({ code: 'DISCONNECTED' });
      await expect(dispatch.choose(request({ model: `m${i}` }), never)).rejects.toMatchObject({ code: 'DISCONNECTED' });
    }
    nowMs += 1_000;
    planner.tick();
    expect(planner.plans()).toHaveLength(1);
    expect(planner.plans()[0]!.prefill.needed).toBeGreaterThan(1);
    workers.all.length = 0;
    nowMs += 60_000;
    planner.tick();
    expect(planner.plans()).toHaveLength(0);
  });
});

describe('what a worker gives', () => {
  const add = (role: 'prefill' | 'decode' | 'both', many: number, prefillTokensPerS: number, stepS: number) => {
    for (let i = 0; i < many; i++) {
      const load = { prefillTokensPerS, stepS, stepPerRequestS: stepS / 100, running: 4, usedBlocks: 40 };
      const worker = workers.add(`${role}${i}`, { maxRunning: role === 'prefill' ? 8 : 64, totalBlocks: 10_000 }, load);
      worker.record = recordOf(`${role}${i}`, { role });
    }
    workers.changed();
  };
  const rates = () => {
    planner.tick();
    nowMs += 500;
    planner.tick();
    return planner.plans()[0]!.rates;
  };

  it('is of those that do it: prefill workers say nothing of streams, decode workers nothing of prompts', () => {
    make();
    add('prefill', 2, 40_000, 0.2);
    add('decode', 8, 10_000, 0.02);
    const told = { prefillTokensPerS: 40_000, stepS: 0.02, stepPerRequestS: 0.0002, streams: 4, maxStreams: 64 };
    for (const [key, value] of Object.entries(told)) expect(rates()).toHaveProperty(key, expect.closeTo(value, 9));
    // Eight workers, four streams each, and a step of 20.8 ms.
    expect(planner.plans()[0]!.load.outputTokensPerS).toBeLessThan((8 * 4) / 0.0208 + 1);
  });

  it('has workers of both roles in it, and all where a role has nobody', () => {
    make();
    add('prefill', 1, 40_000, 0.2);
    expect(rates()).toMatchObject({ prefillTokensPerS: 40_000, stepS: 0.2, maxStreams: 8 });
    add('both', 1, 20_000, 0.02);
    expect(rates()).toMatchObject({ prefillTokensPerS: 30_000, stepS: 0.02, maxStreams: 64 });
  });
});

describe('roles', () => {
  it('stay where they are fixed', async () => {
    make();
    workers.add('a');
    workers.add('b');
    await run(20);
    expect(turns).toBe(0);
  });

  it('that are live follow the load, seldom', async () => {
    make({ roles: 'live', holdMs: 5_000, ceiling: 0.9 });
    const load = { stepS: 0.02, stepPerRequestS: 0.0001, prefillTokensPerS: 10_000 };
    for (const name of ['a', 'b', 'c', 'd']) workers.add(name, { maxRunning: 2 }, load);
    await run(20, { tokens: 30 });
    const leanings = () => workers.all.map((worker) => worker!.leaning).toSorted();
    expect(leanings()).toEqual(['decode', 'decode', 'decode', 'decode']);
    // 30,000 prompt tokens a second need three, one stream needs one.
    await run(30, { tokens: 3_000 });
    expect(leanings().filter((leaning) => leaning === 'prefill').length).toBeGreaterThanOrEqual(2);
    expect(leanings()).toContain('decode');
    const before = turns;
    await run(30, { tokens: 3_000 });
    expect(turns - before).toBe(0);
    await run(30, { tokens: 30 });
    expect(leanings()).toEqual(['decode', 'decode', 'decode', 'decode']);
    expect(turns).toBeLessThan(16);
  });
});

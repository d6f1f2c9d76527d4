import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type LoadFigures, planWorkers, streamsWithin, type Targets, type WorkerRates, waitS } from './plan.ts';

const targets: Targets = { firstTokenS: 2, betweenTokensS: 0.05, ceiling: 0.8 };
const rates: WorkerRates = {
  prefillTokensPerS: 10_000,
  stepS: 0.01,
  stepPerRequestS: 0.001,
  streams: 0,
  maxStreams: 256,
};
const load: LoadFigures = { requestsPerS: 10, promptTokensPerS: 40_000, hitRatio: 0.5, outputTokensPerS: 1_600 };

describe('a plan', () => {
  it('by hand', () => {
    // 20,000 uncached tokens a second over 8,000; 40 streams with steps of 50 ms are 800 tokens a second, of which 640.
    expect(planWorkers(load, rates, targets)).toEqual({
      prefill: { demandTokensPerS: 20_000, rateTokensPerS: 10_000, needed: 2.5, workers: 3, isReachable: true },
      decode: { demandTokensPerS: 1_600, rateTokensPerS: 800, needed: 2.5, workers: 3, isReachable: true },
    });
  });

  it('a tight target takes more than the ceiling does, one that no worker meets does not', () => {
    const tight = planWorkers(load, rates, { ...targets, firstTokenS: 0.21 }).prefill;
    expect([tight.workers, tight.isReachable]).toEqual([5, true]);
    expect(0.2 + waitS(5, 20_000 / 50_000, 0.2)).toBeLessThanOrEqual(0.21);
    expect(0.2 + waitS(4, 20_000 / 40_000, 0.2)).toBeGreaterThan(0.21);
    expect(0.2 + waitS(tight.needed, 20_000 / (10_000 * tight.needed), 0.2)).toBeCloseTo(0.21, 9);
    expect(planWorkers(load, rates, { ...targets, firstTokenS: 0.19 }).prefill).toMatchObject({
      workers: 3,
      isReachable: false,
    });
    expect(planWorkers(load, rates, { ...targets, betweenTokensS: 0.005 }).decode).toMatchObject({
      isReachable: false,
    });
  });

  it('nothing comes, nobody is needed', () => {
    const none = { requestsPerS: 0, promptTokensPerS: 0, hitRatio: 0, outputTokensPerS: 0 };
    expect(planWorkers(none, rates, targets)).toMatchObject({ prefill: { workers: 0 }, decode: { workers: 0 } });
    expect(planWorkers({ ...load, hitRatio: 1 }, rates, targets).prefill).toMatchObject({ needed: 0, workers: 0 });
  });

  it('a worker that does not tell its steps apart is not taken for faster than it was', () => {
    expect(streamsWithin({ ...rates, stepPerRequestS: 0, stepS: 0.04, streams: 32 }, 0.05)).toEqual({
      streams: 40,
      isReachable: true,
    });
    expect(streamsWithin({ ...rates, stepPerRequestS: 0, stepS: 0.04, streams: 0 }, 0.05)).toEqual({
      streams: 256,
      isReachable: true,
    });
    expect(streamsWithin({ ...rates, maxStreams: 8 }, 0.05).streams).toBe(8);
  });
});

const positive = (max: number) => fc.double({ min: 1e-3, max, noNaN: true });
const anyLoad: fc.Arbitrary<LoadFigures> = fc.record({
  requestsPerS: positive(1e3),
  promptTokensPerS: positive(1e6),
  hitRatio: fc.double({ min: 0, max: 1, noNaN: true }),
  outputTokensPerS: positive(1e5),
});
const anyRates: fc.Arbitrary<WorkerRates> = fc.record({
  prefillTokensPerS: fc.double({ min: 100, max: 1e5, noNaN: true }),
  stepS: positive(0.1),
  stepPerRequestS: fc.oneof(fc.constant(0), positive(0.01)),
  streams: fc.integer({ min: 0, max: 256 }),
  maxStreams: fc.integer({ min: 1, max: 1_024 }),
});
const anyTargets: fc.Arbitrary<Targets> = fc.record({
  firstTokenS: positive(30),
  betweenTokensS: positive(0.2),
  ceiling: fc.double({ min: 0.1, max: 0.95, noNaN: true }),
});
const atTheCeiling: [LoadFigures, WorkerRates, Targets] = [
  { requestsPerS: 1e-3, promptTokensPerS: 1e6 * (1 - 2 ** -50), hitRatio: 0, outputTokensPerS: 1 },
  { prefillTokensPerS: 1e5 * (1 - 2 ** -49), stepS: 1e-3, stepPerRequestS: 0, streams: 251, maxStreams: 1_018 },
  { firstTokenS: 26, betweenTokensS: 1e-3, ceiling: 0.1 },
];
const share = fc.double({ min: 0, max: 1, noNaN: true });

it('is enough, and one worker less is not', () => {
  fc.assert(
    fc.property(anyLoad, anyRates, anyTargets, (given, worker, target) => {
      const { prefill, decode } = planWorkers(given, worker, target);
      const serviceS = prefill.demandTokensPerS / given.requestsPerS / worker.prefillTokensPerS;
      // A share that is the ceiling but for rounding counts for either side.
      const isEnough = (workers: number, rounding: number): boolean => {
        const used = prefill.demandTokensPerS / (workers * worker.prefillTokensPerS);
        if (used > target.ceiling * (1 + rounding)) return false;
        return !prefill.isReachable || serviceS + waitS(workers, used, serviceS) <= target.firstTokenS;
      };
      if (prefill.workers > 0 && prefill.workers < 1e5) {
        expect(isEnough(prefill.workers, 1e-9)).toBe(true);
        if (prefill.workers > 1) expect(isEnough(prefill.workers - 1, -1e-9)).toBe(false);
      }
      const { streams, isReachable } = streamsWithin(worker, target.betweenTokensS);
      expect(decode.isReachable).toBe(isReachable);
      if (decode.workers < 1e5)
        expect(decode.workers * target.ceiling * decode.rateTokensPerS).toBeGreaterThanOrEqual(
          decode.demandTokensPerS * (1 - 1e-9),
        );
      expect(streams).toBeLessThanOrEqual(worker.maxStreams);
      for (const { needed, workers } of [prefill, decode])
        expect([workers, needed >= 0]).toEqual([Math.ceil(needed), true]);
    }),
    { examples: [atTheCeiling] },
  );
});

/** Twice as much needs two workers by the ceiling; as it is, two by the wait. */
const besideTheCeiling: [LoadFigures, WorkerRates, Targets, number] = [
  { requestsPerS: 50.34, promptTokensPerS: 5.000_000_000_000_01, hitRatio: 0, outputTokensPerS: 0.001 },
  { prefillTokensPerS: 100.000_000_000_000_09, stepS: 0.001, stepPerRequestS: 0.001, streams: 0, maxStreams: 1 },
  { firstTokenS: 0.001_000_000_000_000_001_3, betweenTokensS: 0.001, ceiling: 0.1 },
  0.999_999_999_999_998_1,
];

it('more load, fewer hits or slower workers never need fewer; hits change decode in nothing', () => {
  fc.assert(
    fc.property(anyLoad, anyRates, anyTargets, share, (given, worker, target, part) => {
      const { prefill, decode } = planWorkers(given, worker, target);
      const more = {
        ...given,
        requestsPerS: given.requestsPerS * (1 + part),
        promptTokensPerS: given.promptTokensPerS * (1 + part),
      };
      const under = planWorkers(more, worker, target).prefill;
      // A prompt takes as long, but for the last digit: it may be the one that decides whether the target can be met at all.
      if (under.isReachable === prefill.isReachable)
        expect(under.needed).toBeGreaterThanOrEqual(prefill.needed * (1 - 1e-8));
      const warm = planWorkers({ ...given, hitRatio: given.hitRatio + (1 - given.hitRatio) * part }, worker, target);
      expect(warm.decode).toEqual(decode);
      if (warm.prefill.isReachable === prefill.isReachable)
        expect(warm.prefill.workers).toBeLessThanOrEqual(prefill.workers);
      const answers = { ...given, outputTokensPerS: given.outputTokensPerS * (1 + part) };
      expect(planWorkers(answers, worker, target).decode.needed).toBeGreaterThanOrEqual(decode.needed);
    }),
    { examples: [besideTheCeiling] },
  );
});

import type { Leaning } from '@kvtier/registry';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type BothWorker, type LeaningInput, type Level, leanWorkers } from './leaning.ts';

const limits = { holdMs: 1_000, band: 0.6 };
const worker = (number: number, part: Partial<BothWorker> = {}): BothWorker => ({
  ...{ number, leaning: undefined, running: 0, tokensAhead: 0 },
  ...part,
});
const workers = (count: number): BothWorker[] => Array.from({ length: count }, (_, number) => worker(number));
const input = (both: BothWorker[], prefillNeeded: number, decodeNeeded: number, part: Partial<LeaningInput> = {}) => ({
  ...{ both, prefillOnly: 0, decodeOnly: 0, prefillNeeded, decodeNeeded },
  ...part,
});
const of = (given: LeaningInput, before?: Level, nowMs = 0): Leaning[] => [
  ...leanWorkers(given, before, nowMs, limits).byNumber.values(),
];

describe('leanings', () => {
  it.each<[string, LeaningInput, Leaning[]]>([
    ['half and half', input(workers(4), 2, 2), ['prefill', 'prefill', 'decode', 'decode']],
    ['one does both', input(workers(4), 1.5, 2.5), ['prefill', 'mixed', 'decode', 'decode']],
    ['one worker takes whole requests, whatever is needed', input(workers(1), 9, 0), ['decode']],
    ['somebody does', input(workers(3), 9, 0), ['prefill', 'prefill', 'decode']],
    ['unless others do', input(workers(2), 9, 1, { decodeOnly: 1 }), ['prefill', 'prefill']],
    ['others prefill enough', input(workers(2), 1, 2, { prefillOnly: 1 }), ['decode', 'decode']],
    ['nothing is needed', input(workers(2), 0, 0), ['decode', 'decode']],
    ['nobody is there', input([], 1, 1), []],
  ])('%s', (_, given, wanted) => expect(of(given).toSorted(byRank)).toEqual(wanted));

  it('who has fewest answers under way is taken, and who has least to prefill goes back', () => {
    const three = [worker(0, { running: 5 }), worker(1, { running: 1 }), worker(2, { running: 9 })];
    const { byNumber } = leanWorkers(input(three, 1, 2), undefined, 0, limits);
    expect([0, 1, 2].map((number) => byNumber.get(number))).toEqual(['decode', 'prefill', 'decode']);
    const back = [
      worker(0, { leaning: 'prefill', tokensAhead: 10 }),
      worker(1, { leaning: 'prefill', tokensAhead: 900 }),
      worker(2),
    ];
    const fewer = leanWorkers(input(back, 1, 2), { level: 2, sinceMs: 0 }, 1_000, limits).byNumber;
    expect([0, 1, 2].map((number) => fewer.get(number))).toEqual(['decode', 'prefill', 'decode']);
  });
});

const ranks: Leaning[] = ['prefill', 'mixed', 'decode'];
const byRank = (a: Leaning, b: Leaning): number => ranks.indexOf(a) - ranks.indexOf(b);
const need = fc.double({ min: 0, max: 20, noNaN: true });

it('over any load and any members: somebody takes whole requests, and no worker changes within the hold but for members', () => {
  const step = fc.record({
    count: fc.integer({ min: 0, max: 6 }),
    decodeOnly: fc.integer({ min: 0, max: 2 }),
    afterMs: fc.integer({ min: 0, max: 1_500 }),
    ...{ prefill: need, decode: need },
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 40 }), (steps) => {
      let level: Level | undefined;
      let nowMs = 0;
      let last = new Map<number, Leaning>();
      let members = '';
      let changedMs = Number.NEGATIVE_INFINITY;
      for (const { count, decodeOnly, afterMs, prefill, decode } of steps) {
        nowMs += afterMs;
        const both = workers(count).map((one) => ({ ...one, leaning: last.get(one.number) }));
        const { held, byNumber } = leanWorkers(input(both, prefill, decode, { decodeOnly }), level, nowMs, limits);
        const whole = [...byNumber.values()].filter((leaning) => leaning !== 'prefill').length;
        if (count > 0) expect(whole + decodeOnly).toBeGreaterThan(0);
        expect(byNumber.size).toBe(count);
        const now = `${count} ${decodeOnly}`;
        const isOther = JSON.stringify([...byNumber]) !== JSON.stringify([...last]);
        if (now === members && isOther) {
          expect(nowMs - changedMs).toBeGreaterThanOrEqual(limits.holdMs);
          changedMs = nowMs;
        }
        if (now !== members) changedMs = held.sinceMs;
        [level, last, members] = [held, new Map(byNumber), now];
      }
    }),
  );
});

it('a load that swings by less than the band swings no worker', () => {
  const swing = fc.double({ min: -0.25, max: 0.25, noNaN: true });
  fc.assert(
    fc.property(
      fc.integer({ min: 2, max: 5 }),
      fc.integer({ min: 1, max: 4 }),
      fc.array(swing, { maxLength: 50 }),
      (count, prefills, swings) => {
        const prefill = Math.min(prefills, count - 1);
        let { held, byNumber } = leanWorkers(input(workers(count), prefill, count - prefill), undefined, 0, limits);
        for (const [at, by] of swings.entries()) {
          const both = workers(count).map((one) => ({ ...one, leaning: byNumber.get(one.number) }));
          const next = leanWorkers(input(both, prefill + by, count - prefill - by), held, (at + 1) * 5_000, limits);
          expect([...next.byNumber]).toEqual(expect.arrayContaining([...byNumber]));
          ({ held, byNumber } = next);
        }
      },
    ),
  );
});

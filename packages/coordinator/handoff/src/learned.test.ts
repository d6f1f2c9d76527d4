/** What is learned from how hand-offs went. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { type Decision, decide } from './decision.ts';
import { Late, Lateness, Latest } from './late.ts';
import { LinkRate, type Transfer } from './link-rate.ts';
import { question, side } from './testing/questions.ts';

it('a link that is waited for is measured; one that is not is as fast as what came over it, at least', () => {
  const rate = new LinkRate();
  const link = {
    came: (one: Omit<Transfer, 'lastBlocks'>) => rate.came({ ...one, lastBlocks: 0 }, 0),
    get perS() {
      return rate.perS(0);
    },
  };
  expect(link.perS).toBe(0);
  link.came({ blocks: 100, tookS: 1, afterS: 0.01 }); // as it was computed
  link.came({ blocks: 2, tookS: 0.04, afterS: 0.03 }); // as long as the way is
  expect(link.perS).toBe(0);
  link.came({ blocks: 100, tookS: 1, afterS: 0.5 });
  expect(link.perS).toBe(100);
  link.came({ blocks: 50, tookS: 1, afterS: 0.1 });
  expect(link.perS).toBe(100);
  link.came({ blocks: 200, tookS: 1, afterS: 0 });
  expect(link.perS).toBe(200);
  for (let i = 0; i < 30; i++) link.came({ blocks: 50, tookS: 1, afterS: 0.6 });
  expect(link.perS).toBeCloseTo(50, 0);
  link.came({ blocks: 0, tookS: 1, afterS: 0.6 });
  expect(link.perS).toBeCloseTo(50, 0);
});

it('a link that nobody waits for is as fast as the last blocks came, which nothing hid', () => {
  const rate = new LinkRate();
  const link = {
    came: (one: Transfer) => rate.came(one, 0),
    get figures() {
      return [rate.perS(0), rate.atLeast];
    },
  };
  const last = { blocks: 100, tookS: 1.2, afterS: 0.01 };
  link.came({ ...last, lastBlocks: 3 }); // as long as the way is
  expect(link.figures).toEqual([0, 0]);
  link.came({ ...last, lastBlocks: 10 });
  expect(link.figures).toEqual([0, 1_000]);
  link.came({ ...last, lastBlocks: 30 });
  expect(link.figures).toEqual([0, 1_500]);
  link.came({ ...last, lastBlocks: 20, afterS: 0 }); // told late: not at once
  expect(link.figures).toEqual([0, 3_625]);
  // It has become slow, and what is measured twice counts; then fast again.
  for (let i = 0; i < 2; i++) link.came({ blocks: 100, lastBlocks: 40, tookS: 2, afterS: 0.8 });
  link.came({ ...last, blocks: 40, lastBlocks: 20, afterS: 0 }); // told late: no news of a link that was measured
  expect(link.figures).toEqual([50, 50]);
  for (let i = 0; i < 30; i++) link.came({ ...last, lastBlocks: 10 });
  expect(rate.perS(0)).toBeGreaterThan(990);
});

/** Half a second of computing over a link that stood still for 2.7 s. */
const stalled = { blocks: 500, lastBlocks: 450, tookS: 3, afterS: 2.7 };
/** 500 blocks, which both sides compute in 0.8 s; the decode side has streams. */
const rates = { prefillTokensPerS: 10_000, maxStepTokens: 2_048, stepS: 0.008, stepPerRequestS: 0.0002 };
const decided = (linkBlocksPerS: number): Decision =>
  decide(
    question({
      ...{ tokens: 8_001, linkBlocksPerS },
      ...{
        decode: side(0, { ...rates, role: 'decode', running: 8 }),
        others: [side(1, { ...rates, role: 'prefill' })],
      },
    }),
  );

it('one transfer that stood still closes no link: what it was measured as is forgotten, and prompts travel again', () => {
  const link = new LinkRate();
  link.came(stalled, 0);
  expect(link.perS(0)).toBeCloseTo(500 / 3, 9);
  expect(decided(link.perS(0)).split).toBeUndefined();
  expect(link.perS(120_000)).toBeCloseTo(2_000 / 3, 9);
  const split = decided(link.perS(240_000)).split!;
  expect(split.travels).toBe(500);
  // They come as they are computed, and the last ones show how fast it is.
  link.came({ blocks: 500, lastBlocks: 32, tookS: 0.8, afterS: 0.0064 }, 240_000);
  expect(link.perS(240_000)).toBeCloseTo(8_000 / 3, 9); // nothing speaks against it
  for (let i = 0; i < 3; i++) link.came({ blocks: 500, lastBlocks: 32, tookS: 0.8, afterS: 0.0064 }, 240_000);
  expect(link.perS(240_000)).toBeGreaterThan(2_900);
});

it('a first measurement that is far less than all else that is known waits for a second one', () => {
  const slow = (link: LinkRate, ownPerS: number): number => {
    link.came(stalled, 0, ownPerS);
    return link.perS(0);
  };
  const measured = 500 / 3;
  const own = new LinkRate();
  expect([slow(own, 1_000), slow(own, 1_000)]).toEqual([0, measured]);
  const seen = new LinkRate();
  seen.came({ blocks: 500, lastBlocks: 32, tookS: 0.8, afterS: 0.032 }, 0);
  expect([slow(seen, 0), slow(seen, 0)]).toEqual([0, measured]);
  // One by itself, again and again.
  const fine = new LinkRate();
  for (let i = 0; i < 5; i++) {
    expect(slow(fine, 1_000)).toBe(0);
    fine.came({ blocks: 500, lastBlocks: 32, tookS: 0.8, afterS: 0.032 }, 0);
  }
  // As others say, more or less.
  expect(slow(new LinkRate(), 300)).toBe(measured);
});

it('a link that is really slow is known as slow by each try, and tried the more seldom', () => {
  const link = new LinkRate();
  const perS = 50;
  link.came({ blocks: 500, lastBlocks: 450, tookS: 500 / perS, afterS: 9 }, 0);
  const triedS: number[] = [];
  for (let s = 0; s < 6_000; s += 20) {
    const { split } = decided(link.perS(s * 1_000));
    if (split === undefined) continue;
    triedS.push(s);
    const tookS = split.travels / perS;
    const hidden = Math.floor(split.computeS * perS);
    const one = { blocks: split.travels, lastBlocks: split.travels - hidden, tookS, afterS: tookS - split.computeS };
    link.came(one, s * 1_000);
    expect(link.perS(s * 1_000)).toBeCloseTo(perS, 9);
  }
  expect(triedS).toEqual([180, 700, 2_700, 5_440]);
});

it('a link that has long been slow, as the engine behind it says, too, is not tried because nothing came for a night', () => {
  const link = new LinkRate();
  const perS = 62;
  for (let s = 0; s < 3 * 3_600; s += 60)
    link.came({ blocks: 500, lastBlocks: 450, tookS: 500 / perS, afterS: 7 }, s * 1_000, perS);
  const nightMs = (3 + 8) * 3_600_000;
  expect(link.perS(nightMs, perS)).toBeCloseTo(perS, 6);
  expect(decided(link.perS(nightMs, perS)).split).toBeUndefined();
  // What shows that it is fast is seen all the same.
  for (let i = 0; i < 20; i++) link.came({ blocks: 500, lastBlocks: 32, tookS: 0.8, afterS: 0.0064 }, nightMs, perS);
  expect(link.perS(nightMs, perS)).toBeGreaterThan(2_000);
});

it.each([0, 200, 5_000])(
  'an accident is forgotten, whatever the engine says of other blocks: %i a second',
  (ownPerS) => {
    const link = new LinkRate();
    for (let i = 0; i < 10; i++) link.came(stalled, i * 3_000, ownPerS);
    expect(decided(link.perS(30_000, ownPerS)).split).toBeUndefined();
    expect(decided(link.perS(330_000, ownPerS)).split?.travels).toBe(500);
  },
);

it('whatever comes, a rate is finite, and stays one once it is one', () => {
  const seconds = fc.double({ min: 0, max: 1_000, noNaN: true });
  const transfers = fc.array(
    fc.record({
      ...{ blocks: fc.integer({ min: 1, max: 10_000 }), lastBlocks: fc.integer({ min: 0, max: 10_000 }) },
      ...{ tookS: seconds, afterS: seconds },
    }),
    {
      minLength: 1,
    },
  );
  fc.assert(
    fc.property(transfers, (all) => {
      const link = new LinkRate();
      let nowMs = 0;
      for (const one of all) {
        const before = link.perS(nowMs);
        nowMs += one.tookS * 1_000;
        link.came(one, nowMs, one.afterS);
        const after = link.perS(nowMs);
        expect(Number.isFinite(after) && (before > 0 ? after > 0 : after >= 0)).toBe(true);
      }
    }),
  );
});

it('lateness goes to the middle of what is seen, within its bounds, and one that is very late counts no more', () => {
  const late = new Late(0, 0.5);
  for (let i = 0; i < 400; i++) late.came(1 + late.s, i % 10 === 0 ? 100 : 1.05);
  expect(late.s).toBeGreaterThan(0.03);
  expect(late.s).toBeLessThan(0.08);
  for (let i = 0; i < 400; i++) late.came(1 + late.s, 0);
  expect(late.s).toBe(0);
  for (let i = 0; i < 1_000; i++) late.came(0, 1);
  expect(late.s).toBe(0.5);
  for (let i = 0; i < 1_000; i++) late.forget(0.01);
  expect(late.s).toBeLessThan(0.001);
});

it('what nine in ten do not pass is of one size of prediction, and believed less the longer nothing came', () => {
  const latest = new Latest(0.5);
  expect(latest.s(0.02, 0, 100)).toBe(0);
  for (let i = 0; i < 400; i++) latest.came(0.02, 2, i);
  expect(latest.s(0.02, 399, 100)).toBe(0.5);
  expect(latest.s(0.02, 499, 100)).toBe(0.25);
  expect(latest.s(0.02, 10_399, 100)).toBeLessThan(1e-9);
  expect(latest.s(0.3, 399, 100)).toBe(0);
  latest.came(0.02, 2, 10_399);
  expect(latest.s(0.02, 10_399, 100)).toBe(0.5);
});

it('what is predicted to take seconds counts as late as it came, up to as long again', () => {
  const latest = new Latest(0.5);
  for (let i = 0; i < 20; i++) latest.came(4, 5.2, 0);
  expect(latest.s(4, 0, 1_000)).toBeCloseTo(1.2, 9);
  for (let i = 0; i < 20; i++) latest.came(4, 60, 0);
  expect([latest.s(4, 0, 1_000), latest.s(3, 0, 1_000), latest.s(1, 0, 1_000)]).toEqual([4, 3, 0]);
});

it('of requests that come as others did, nine in ten are no later than the last few say, whatever came before', () => {
  const lateness = fc.double({ min: 0, max: 0.4, noNaN: true });
  const some = (many: number, least = 0) => fc.array(lateness, { minLength: least, maxLength: many });
  fc.assert(
    fc.property(some(60), some(20, 20), (old, all) => {
      const latest = new Latest(0.5);
      for (const lateS of [...old, ...all]) latest.came(1.5, 1.5 + lateS, 0);
      const latestS = latest.s(1.5, 0, 1_000);
      // The 19th of 20: of 21 places 19 are at or below it, and 18 would be too few.
      expect(all.filter((lateS) => lateS <= latestS + 1e-9).length).toBeGreaterThanOrEqual(19);
      expect(all.filter((lateS) => lateS < latestS - 1e-9).length).toBeLessThan(19);
    }),
  );
});

it('what makes predictions wrong is known once it has befallen ten, and is forgotten with the next twenty', () => {
  const latest = new Latest(0.5);
  const lateS = (): number => latest.s(1.5, 0, 1_000);
  for (let i = 0; i < 100; i++) latest.came(1.5, 1.4, 0);
  expect(lateS()).toBe(0); // sooner is nothing to be refused for
  latest.came(1.5, 100, 0);
  expect(lateS()).toBe(0); // one of 20 that is very late is none of the nine in ten
  latest.came(1.5, 100, 0);
  expect(lateS()).toBe(1.5);
  for (let i = 0; i < 20; i++) latest.came(1.5, 1.75, 0);
  expect(lateS()).toBe(0.25);
  for (let i = 0; i < 18; i++) latest.came(1.5, 1.5, 0);
  expect(lateS()).toBe(0.25);
  latest.came(1.5, 1.5, 0);
  expect(lateS()).toBe(0);
  // While few have come, the last of them counts: one alone says what it saw.
  const few = new Latest(0.5);
  few.came(1.5, 1.6, 0);
  few.came(1.5, 1.5, 0);
  expect(few.s(1.5, 0, 1_000)).toBeCloseTo(0.1, 9);
});

it('short prompts learn nothing of how late long ones came while there was too much to do', () => {
  const late = new Lateness(0.004, 0.5);
  expect([late.aloneS(0.02), late.splitS(0.02)]).toEqual([0, 0.004]);
  for (let i = 0; i < 400; i++) late.came(false, 0.3, 2);
  expect([late.aloneS(0.02), late.splitS(0.02)]).toEqual([0, 0.004]);
  expect(late.aloneS(0.3)).toBe(0.5);
});

it('a split that nobody has tried is as late as what is served alone, and later; one that was tried, as it was', () => {
  const late = new Lateness(0.004, 0.5);
  for (let i = 0; i < 400; i++) late.came(false, 0.3, 0.4);
  expect(late.aloneS(0.3)).toBeCloseTo(0.1, 1);
  expect(late.splitS(0.3)).toBe(late.aloneS(0.3) + 0.004);
  for (let i = 0; i < 400; i++) late.came(true, 0.3, 0.3);
  expect(late.splitS(0.3)).toBeLessThan(0.01);
  const tried = late.splitS(0.3);
  for (let i = 0; i < 20; i++) late.came(false, 0.3, 0.4);
  expect(late.splitS(0.3)).toBeGreaterThan(tried);
  for (let i = 0; i < 2_000; i++) late.came(false, 0.3, 0.4);
  expect(late.splitS(0.3)).toBeCloseTo(late.aloneS(0.3) + 0.004, 2);
});

it('nothing counts as later than as long again, nor as sooner than predicted', () => {
  const seconds = fc.double({ min: 0, max: 100, noNaN: true });
  const came = fc.record({ isSplit: fc.boolean(), predictedS: seconds, seenS: seconds });
  fc.assert(
    fc.property(fc.array(came, { maxLength: 60 }), seconds, (all, predictedS) => {
      const late = new Lateness(0.004, 0.5);
      for (const one of all) late.came(one.isSplit, one.predictedS, one.seenS);
      const most = Math.min(Math.max(2 * predictedS, 0.002), 0.5);
      for (const lateS of [late.aloneS(predictedS), late.splitS(predictedS) - 0.004]) {
        expect(lateS).toBeGreaterThanOrEqual(-0.004);
        expect(lateS).toBeLessThanOrEqual(most);
      }
    }),
  );
});

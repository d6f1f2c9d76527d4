/** The decision against what must hold of it, whatever the figures; and by hand for the few that a person can compute. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { type Decision, decide, handOffReasons, lineOf } from './decision.ts';
import type { Question, Side } from './question.ts';
import { lateBy, matchOf, question, questions, side, sideFigures } from './testing/questions.ts';

const worse = (a: Decision, b: Decision): boolean =>
  a.expected.misses > b.expected.misses ||
  (a.expected.misses === b.expected.misses && a.expected.costS > b.expected.costS * 1.0001 + 1e-9);

describe('whatever the figures', () => {
  it('only one that may compute is asked, for blocks that are lacking, and the reason says what was decided', {
    timeout: 120_000,
  }, () => {
    fc.assert(
      fc.property(questions, (asked) => {
        const { reason, split, expected, alone, isLacking } = decide(asked);
        expect(handOffReasons).toContain(reason);
        expect(['sooner', 'spares-streams', 'always'].includes(reason)).toBe(split !== undefined);
        expect(lineOf(asked, decide(asked))).toMatch(/^(split P=w\d; |none; )[\x20-\x7e]+$/);
        if (isLacking) expect(asked.decode.role).toBe('decode');
        for (const { ttftS, costS, itlS } of [expected, alone])
          expect([ttftS, costS, itlS].every((value) => Number.isFinite(value) && value >= 0)).toBe(true);
        if (split === undefined) return;
        const { prefill, blocks } = split;
        const { decode } = asked;
        expect(asked.others).toContain(prefill);
        expect([prefill.isReady, prefill.role === 'decode', prefill.legs < asked.legsPerWorker]).toEqual([
          true,
          false,
          true,
        ]);
        expect([prefill.revision, prefill.identity]).toEqual([decode.revision, decode.identity]);
        expect(prefill.node === null || decode.node === null || asked.legsLeft === 0).toBe(false);
        expect(blocks).toBeGreaterThan(decode.match.blocks);
        expect(blocks * asked.blockTokens).toBeLessThan(asked.tokens);
        expect(split.travels).toBe(prefill.node === decode.node ? 0 : blocks - decode.match.blocks);
        expect(split.firstS).toBeLessThanOrEqual(split.arrivedS + 1e-9);
        if (asked.mode !== 'predicted') return;
        expect(split.misses < alone.misses || split.costS < alone.costS).toBe(true);
      }),
      { numRuns: 2_000 },
    );
  });

  it('the same figures are decided the same way, whatever the order of the workers', () => {
    fc.assert(
      fc.property(questions, fc.nat(), (asked, turn) => {
        const at = asked.others.length === 0 ? 0 : turn % asked.others.length;
        const others = [...asked.others.slice(at), ...asked.others.slice(0, at)];
        expect(decide({ ...asked, others })).toEqual(decide(asked));
      }),
    );
  });

  it('what the decode side holds whole is never split, nor is what has no full block', () => {
    fc.assert(
      fc.property(questions, (asked) => {
        const full = Math.floor((asked.tokens - 1) / asked.blockTokens);
        const decode = { ...asked.decode, match: matchOf(full) };
        expect(decide({ ...asked, decode }).split).toBeUndefined();
        expect(decide({ ...asked, tokens: asked.blockTokens }).split).toBeUndefined();
      }),
    );
  });

  const busier: Record<string, (one: Side) => Partial<Side>> = {
    'tokens ahead': ({ tokensAhead }) => ({ tokensAhead: tokensAhead + 1_000 }),
    'a slower rate': ({ prefillTokensPerS }) => ({ prefillTokensPerS: prefillTokensPerS * 0.7 }),
    'less trust in its pace': ({ pacingTrust }) => ({ pacingTrust: pacingTrust / 2 }),
    'loads ahead': ({ loadAheadS }) => ({ loadAheadS: loadAheadS + 0.5 }),
    'less held': ({ match: { blocks } }) => ({ match: matchOf(Math.max(blocks - 10, 0)) }),
  };
  it.each(Object.keys(busier))('a prefill worker with %s is never a reason to split where there was none', (what) => {
    fc.assert(
      fc.property(questions, (asked) => {
        // Of a worker beside it, what it holds is there for the decode side, too.
        const others = asked.others.slice(0, 1);
        const before = decide({ ...asked, mode: 'predicted', others });
        const after = decide({
          ...{ ...asked, mode: 'predicted' as const },
          others: others.map((one) => ({ ...one, ...busier[what]!(one) })),
        });
        if (before.split === undefined) expect(after.split).toBeUndefined();
        else expect(worse(before, after)).toBe(false);
      }),
    );
  });

  it('a slower link, or more on it, is never a reason to split, nor a better prediction', () => {
    fc.assert(
      fc.property(questions, (asked) => {
        const before = decide({ ...asked, mode: 'predicted', linkBlocksPerS: asked.linkBlocksPerS + 1 });
        for (const part of [
          { linkBlocksPerS: (asked.linkBlocksPerS + 1) / 2 },
          { linkBlocksPerS: asked.linkBlocksPerS + 1, pendingBlocks: asked.pendingBlocks + 500 },
        ]) {
          const after = decide({ ...asked, mode: 'predicted', ...part });
          if (before.split === undefined) expect(after.split).toBeUndefined();
          else expect(worse(before, after)).toBe(false);
        }
      }),
    );
  });

  it('one worker more never makes it worse', () => {
    fc.assert(
      fc.property(questions, sideFigures, (asked, one) => {
        const before = decide({ ...asked, mode: 'predicted' });
        const after = decide({ ...asked, mode: 'predicted', others: [...asked.others, side(9, one)] });
        expect(worse(after, before)).toBe(false);
      }),
    );
  });
});

describe('by hand', () => {
  const running = (count: number, part: Partial<Side> = {}): Side => side(0, { running: count, ...part });

  it('idle workers: nothing is won', () => {
    expect(decide(question())).toMatchObject({ reason: 'alone', split: undefined, alone: { misses: 0 } });
  });

  it('a decode worker with a queue: the idle one computes, as its blocks travel meanwhile', () => {
    const asked = question({ decode: side(0, { tokensAhead: 1_000, waiting: 1 }), ttftS: 10 });
    const { reason, split } = decide(asked);
    // 1.6 s of compute, and 31 blocks of the last step at 1,000 a second; the tail is one token.
    expect({ reason, blocks: split!.blocks }).toEqual({ reason: 'sooner', blocks: 100 });
    expect(split!.arrivedS).toBeCloseTo(1.6 + 0.031, 6);
    expect(split!.ttftS).toBeCloseTo(1.631 + 0.001 + 0.01 + 0.004, 6);
  });

  it('a decode worker that trusts its rates less computes a prompt by shorter steps', () => {
    const alone = (pacingTrust: number, role: Side['role'] = 'decode') =>
      decide(question({ mode: 'never', itlS: 0.113, decode: running(3, { role, pacingTrust }) })).alone;
    // 100 ms are left beside its streams: a step of 90 tokens, or of 50.
    expect(alone(0.9).plainS).toBeCloseTo(0.013 / 2 + 1.601 * (1 + 13 / 90) + 0.013, 6);
    expect(alone(0.5).plainS).toBeCloseTo(0.013 / 2 + 1.601 * (1 + 13 / 50) + 0.013, 6);
    expect([alone(0.9).itlS, alone(0.5).itlS]).toEqual([expect.closeTo(0.103, 9), expect.closeTo(0.063, 9)]);
    // One that is not told a target takes whole steps, whatever it trusts.
    expect(alone(0.5, 'both')).toEqual(alone(0.9, 'both'));
  });

  it('prefill gives the first token where it computes all blocks and the next token follows in time, else decode', () => {
    const splitOf = (part: Partial<Question>) => decide(question({ mode: 'always', ...part })).split!;
    const { pauseS, blocks } = splitOf({});
    const of = (part: Partial<Question>) => splitOf({ itlS: pauseS, ...part }).draws;
    expect([blocks, of({}), of({ itlS: pauseS - 1e-6 }), of({ maxTokens: 1 })]).toEqual([100, true, false, false]);
    // 31 blocks of its last step, the tail, the step under way and one more.
    expect(pauseS).toBeCloseTo(0.031 + 0.001 + 2 * 0.01, 9);
    // Where pauses were later than predicted of late, the decode side gives it.
    expect([of({ itlS: pauseS + 0.1, late: lateBy(0, 0, 0.1) }), of({ late: lateBy(0, 0, 0.001) })]).toEqual([
      true,
      false,
    ]);
    // Prompts beside streams there, when the blocks come: the step under way alone is nearly as long as the target.
    const beside = (tokensAhead: number) => of({ itlS: 0.2, decode: running(3, { role: 'decode', tokensAhead }) });
    expect([beside(100_000), beside(100), beside(0)]).toEqual([false, true, true]);
  });

  it('prefill gives no first token that makes all others later by more than it is worth', () => {
    const draws = (tokens: number, ttftS: number) =>
      decide(question({ mode: 'always', tokens, ttftS, itlS: 1, linkBlocksPerS: 400 })).split!.draws;
    // 15 tokens behind the blocks, 15 ms before these travel; a step of 10 ms less, and the first token 15 ms and more sooner.
    expect([draws(1_615, 20), draws(63, 20), draws(63, 0.1)]).toEqual([true, false, true]);
  });

  it('prefill gives no first token that fills its pool: its engine would end the answer with it', () => {
    const draws = (maxTotalTokens: number) =>
      decide(question({ mode: 'always', itlS: 1, others: [side(1, { maxTotalTokens })] })).split!.draws;
    expect([draws(1_602), draws(1_603)]).toEqual([false, true]);
  });

  it('a rest of a block waits at the decode side for a step, not for the prompts there', () => {
    const decode = (tokensAhead: number) => running(3, { role: 'decode', tokensAhead });
    const of = (tokens: number, tokensAhead: number) =>
      decide(question({ mode: 'always', tokens, decode: decode(tokensAhead) })).split!;
    const [idle, busy] = [of(1_601, 0), of(1_601, 100_000)];
    // Half of a step of 13 ms and 33.3 tokens, and 33.3 tokens in its own.
    expect(busy.ttftS - idle.ttftS).toBeCloseTo(0.0333 + (0.013 + 0.0333) / 2, 6);
    // Prompts that end before its blocks are there are none of its business.
    expect(of(1_601, 1_000).ttftS).toBe(idle.ttftS);
  });

  it('a short prompt is not split for one stream: its own answer would be later by more', () => {
    const figures = { prefillTokensPerS: 1_550, prefillStepS: 0.007, stepS: 0.003, stepPerRequestS: 0.002 };
    const one = (count: number) =>
      decide(
        question({
          ...{ tokens: 48, maxTokens: 8, ttftS: 4, itlS: 0.16, linkBlocksPerS: 380, late: lateBy(0.002, 0.016) },
          decode: running(count, { role: 'decode', ...figures }),
          others: [side(1, { role: 'prefill', ...figures })],
        }),
      ).split?.blocks;
    expect([one(0), one(1), one(8)]).toEqual([undefined, undefined, 2]);
  });

  it('part of the prefix is computed by decode where the link is the bottleneck, and nowhere else', () => {
    const blocksOf = (linkBlocksPerS: number, tokensAhead: number) =>
      decide(
        question({
          ...{ linkBlocksPerS, ttftS: 10, decode: side(0, { tokensAhead: 1_000 }) },
          others: [side(1, { tokensAhead })],
        }),
      ).split?.blocks;
    // 100 blocks are computed in 1.6 s, as long as decode has to do.
    const slow = blocksOf(30, 0)!;
    expect(slow).toBeGreaterThan(0);
    expect(slow).toBeLessThan(100);
    // However long its queue: decode would be busy with the rest, and prefill is soon free.
    for (let ahead = 0; ahead <= 1_500; ahead += 100) expect([100, undefined]).toContain(blocksOf(1_000, ahead));
  });

  it('streams that run are spared, and counted', () => {
    const { reason, split, alone } = decide(question({ decode: running(3) }));
    expect([reason, alone.slowed, split!.slowed]).toEqual(['spares-streams', 3, 0]);
    expect(alone.itlS).toBeCloseTo(0.01 + 3 * 0.001 + 0.5, 6);
  });

  it('a worker both takes prompts of others as far as its own streams’ target allows', () => {
    const decode = running(3);
    const one = (count: number, itlS: number) =>
      decide(question({ decode, others: [side(1, { running: count })], itlS }));
    expect(one(1, 0.05).split?.slowed).toBe(1);
    expect(one(4, 0.05)).toMatchObject({ reason: 'alone' });
    expect(one(1, 1)).toMatchObject({ split: { slowed: 0 } });
  });

  it('a decode worker keeps to its streams’ target, and so slowly computes what it computes itself', () => {
    const decode = running(3, { role: 'decode' });
    const { split, alone } = decide(question({ decode, ttftS: 10 }));
    // A step of 13 ms leaves 37 of 50: 33.3 tokens a step, and a token takes 1 ms and its share of the step beside it.
    const chunk = 0.9 * 0.037 * 1_000;
    expect(alone.slowed).toBe(0);
    expect(alone.itlS).toBeCloseTo(0.013 + chunk / 1_000, 9);
    expect(alone.ttftS).toBeCloseTo(0.0065 + 1_601 * (0.001 + 0.013 / chunk) + 0.013, 9);
    // Streams in time are harmed by a tenth of it.
    const worth = alone.ttftS ** 2 / (2 * (10 / 3));
    const tokensS = alone.ttftS * 0.1;
    expect(alone.costS).toBeCloseTo(worth + tokensS + 1_601 * (0.001 + 0.013 / chunk) * 3 * 0.1, 9);
    expect(split).toMatchObject({ slowed: 0, blocks: 100 });
  });

  it('a decode worker takes a prompt itself while prefill has a queue that costs more', () => {
    const decode = running(3, { role: 'decode' });
    const behind = (tokensAhead: number) =>
      decide(question({ decode, others: [side(1, { role: 'prefill', tokensAhead })], ttftS: 10 })).reason;
    // Alone: 2.25 s, and 0.67 s of harm. There: 1.6 s, 31 ms of the link, 14 ms of its own step and way, and the queue.
    expect([behind(0), behind(1_000), behind(1_400), behind(3_000)]).toEqual([
      'sooner',
      'spares-streams',
      'alone',
      'alone',
    ]);
  });

  it('what it costs never falls while a first token comes later, however long the request has waited', () => {
    const seconds = fc.double({ min: 0, max: 20, noNaN: true });
    fc.assert(
      fc.property(seconds, seconds, seconds, fc.double({ min: 0.01, max: 10, noNaN: true }), (waitedS, a, b, ttftS) => {
        const costOf = (lateS: number) => decide(question({ waitedS, ttftS, late: lateBy(lateS, 0) })).alone.costS;
        expect(costOf(Math.min(a, b))).toBeLessThanOrEqual(costOf(Math.max(a, b)) + 1e-9);
        expect(costOf(a)).toBeGreaterThanOrEqual(0);
      }),
    );
  });

  it('steps of prefill are as long as makes their number and the last one’s way cost least', () => {
    const figures = fc.record({
      tokens: fc.integer({ min: 40, max: 6_000 }),
      linkBlocksPerS: fc.double({ min: 10, max: 20_000, noNaN: true }),
      prefillStepS: fc.double({ min: 1e-4, max: 0.05, noNaN: true }),
      maxStepTokens: fc.constantFrom(64, 512, 2_048),
    });
    fc.assert(
      fc.property(figures, ({ prefillStepS, maxStepTokens, ...part }) => {
        const others = [side(1, { prefillStepS, maxStepTokens })];
        const { blocks, stepBlocks, travels } = decide(question({ mode: 'always', others, ...part })).split!;
        expect(travels).toBe(blocks);
        const [most, used] = [maxStepTokens / 16, stepBlocks || maxStepTokens / 16];
        expect(used).toBeLessThanOrEqual(most);
        const costOf = (size: number): number => (blocks / size) * prefillStepS + size / part.linkBlocksPerS;
        for (let size = 1; size <= Math.min(most, blocks); size++)
          // Whole blocks: one more than is best, at most.
          expect(costOf(Math.min(used, blocks))).toBeLessThanOrEqual(costOf(size) + 1 / part.linkBlocksPerS + 1e-12);
      }),
    );
  });

  it('steps of prefill are as it likes where nothing travels, and where its steps cost nothing that is known', () => {
    const stepsOf = (part: Partial<Side>) => decide(question({ mode: 'always', others: [side(1, part)] })).split!;
    expect(stepsOf({ prefillStepS: 0.001 }).stepBlocks).toBe(10);
    // Whoever waits behind it pays for each step, too.
    expect(stepsOf({ prefillStepS: 0.001, waiting: 3 }).stepBlocks).toBe(20);
    expect([stepsOf({}).stepBlocks, stepsOf({ prefillStepS: 0.001, node: 'n0' }).stepBlocks]).toEqual([0, 0]);
    // 1.6 s and 6 steps more than four; its last ten blocks travel behind it.
    expect(stepsOf({ prefillStepS: 0.001 }).arrivedS).toBeCloseTo(1.6 + 0.006 + 0.01, 9);
  });

  it('who waits at the decode worker for another one’s blocks is not held up by what is computed there', () => {
    const decodeOf = (awaiting: number) => side(0, { role: 'decode', waiting: 2, awaiting });
    const costOf = (awaiting: number) => decide(question({ decode: decodeOf(awaiting), ttftS: 10 })).alone.costS;
    const [none, all] = [costOf(0), costOf(2)];
    // Two that are: half of what is computed, each, and as urgent as its own first token after 5 ms, 1.601 s and a step.
    expect(none - all).toBeCloseTo(1.601 * (1.616 / (10 / 3) + 0.1), 9);
    expect(costOf(9)).toBe(all);
    const others = [side(1, { role: 'prefill', tokensAhead: 800 })];
    const reason = (awaiting: number) => decide(question({ decode: decodeOf(awaiting), others, ttftS: 10 })).reason;
    expect([reason(0), reason(2)]).toEqual(['spares-streams', 'alone']);
  });

  it('time that has passed, lateness that was learned, and loads under way count', () => {
    const alone = (part: Partial<Question>) => decide(question(part)).alone;
    expect([alone({ waitedS: 0.3 }).misses, alone({ waitedS: 0.5 }).misses]).toEqual([0, 1]);
    expect(alone({ late: lateBy(0.3, 0) }).ttftS).toBeCloseTo(1.601 + 0.01 + 0.3, 9);
    // 50 blocks at 1,000 a second come behind what is being loaded; the others are computed.
    const decode = side(0, { loadAheadS: 0.5, remoteBlocks: 50, remoteMedium: 3 });
    expect(alone({ decode }).ttftS).toBeCloseTo(0.5 + 0.05 + 0.801 + 0.01, 9);
    expect(decide(question({ mode: 'always', pendingBlocks: 3_000 })).split!.arrivedS).toBeCloseTo(3.1, 9);
  });

  it('room is waited for: of the whole request where it is answered, of its prompt where it is computed for another', () => {
    const full = { running: 1, usedBlocks: 950, totalBlocks: 1_000, freedBlocksPerS: 100 };
    const tokenS = 0.001 + 0.011 / 500;
    const { alone, split } = decide(question({ mode: 'always', decode: side(0, full), others: [side(1, full)] }));
    expect(alone.ttftS).toBeCloseTo(0.57 + 1_601 * tokenS + 0.011, 9);
    expect(split!.arrivedS).toBeCloseTo(0.51 + 1_600 * tokenS + 0.031, 9);
  });

  it('streams that are too slow already are not made so; prompts get a quarter of the target beside them at least', () => {
    expect(decide(question({ decode: running(3), itlS: 0.01 })).alone.slowed).toBe(0);
    const { alone } = decide(question({ decode: running(185, { role: 'decode' }), itlS: 0.2 }));
    expect(alone.itlS).toBeCloseTo(0.195 + 0.9 * 0.05, 9);
  });

  it('a split has to cost a twentieth less', () => {
    const at = (prefillTokensPerS: number) => decide(question({ others: [side(1, { prefillTokensPerS })] })).reason;
    // 1.611 s alone; 1.584 and 1.380 s there.
    expect([at(1_040), at(1_200)]).toEqual(['alone', 'sooner']);
  });

  it('where the link is the bottleneck, fewer blocks travel, and the decode side computes the rest', () => {
    const decode = side(0, { tokensAhead: 500 });
    const others = [side(1, { held: 100 })];
    const blocksAt = (linkBlocksPerS: number) =>
      decide(question({ decode, others, linkBlocksPerS, ttftS: 10 })).split?.blocks;
    expect(blocksAt(10_000)).toBe(100);
    // A block takes 16 ms to compute and 20 ms to travel; the decode side begins in 0.5 s anyway: 25 travel until then.
    expect(blocksAt(50)).toBe(25);
    expect(blocksAt(1)).toBeUndefined();
  });

  it('shares are looked at for a few workers, the best of them among these, however many there are', () => {
    let computed = 0;
    const late = {
      aloneS: () => 0,
      splitS: () => {
        computed++;
        return 0;
      },
      pauseS: () => 0,
    };
    // The link is slower than any of them; the last one has nothing to compute.
    const others = Array.from({ length: 1_000 }, (_, at) => side(at + 1, { running: 3, held: at === 999 ? 100 : 20 }));
    const decode = side(0, { tokensAhead: 500 });
    const { split } = decide(question({ decode, others, linkBlocksPerS: 50, ttftS: 10, late }));
    expect([split!.prefill.number, split!.blocks]).toEqual([1_000, 25]);
    expect(computed).toBeLessThan(1_500);
  });

  it('beside the same node nothing travels', () => {
    const asked = question({ decode: running(3, { node: 'n' }), others: [side(1, { node: 'n' })], linkBlocksPerS: 1 });
    expect(decide(asked).split).toMatchObject({ travels: 0, blocks: 100 });
    expect(lineOf(asked, decide(asked))).toContain('link=same node');
  });

  it.each<[string, Partial<Question>]>([
    ['never', { mode: 'never' }],
    ['short', { tokens: 16 }],
    ['held', { decode: side(0, { held: 100 }) }],
    ['no-prefill-worker', { others: [side(1, { role: 'decode' }), side(2, { isReady: false })] }],
    ['other-revision', { others: [side(1, { revision: 'v2' }), side(2, { identity: 'other' })] }],
    ['no-node', { others: [side(1, { node: null })] }],
    ['no-node', { decode: side(0, { node: null }) }],
    ['no-link', { links: new Set(['n7']) }],
    ['no-link', { links: new Set(), others: [side(1), side(2)] }],
    // 1,601 tokens, and room for one behind them.
    ['prefill-too-small', { others: [side(1, { maxTotalTokens: 1_601 })] }],
    ['prefill-busy', { others: [side(1, { legs: 8 })] }],
    ['prefill-busy', { legsLeft: 0 }],
    ['prefill-late', { others: [side(1, { tokensAhead: 60_001 })] }],
    ['prefill-late', { mode: 'always', others: [side(1, { tokensAhead: 60_001 })] }],
  ])('%s', (reason, part) => {
    expect(decide(question(part)).reason).toBe(reason);
  });

  it.each([18, 64])(
    '%i nodes: only one from whose node the decode side fetches is asked, or one of its own node',
    (count) => {
      const decode = running(3, { role: 'decode' });
      const others = Array.from({ length: count - 1 }, (_, at) => side(at + 1, { tokensAhead: 10 * at }));
      const askedOf = (links: Question['links'], part: Partial<Question> = {}) =>
        decide(question({ decode, others, mode: 'always', links, ...part })).split?.prefill.name;
      // Whose node does not say may fetch from any: the idlest is asked.
      expect(askedOf(undefined)).toBe('w1');
      for (let at = 1; at < count; at++) expect(askedOf(new Set([`n${at}`, 'n99']))).toBe(`w${at}`);
      expect(askedOf(new Set(['n5', `n${count - 1}`]))).toBe('w5');
      expect(askedOf(new Set(), { others: [...others, side(count, { node: 'n0', tokensAhead: 9_000 })] })).toBe(
        `w${count}`,
      );
      const lacking = decide(question({ decode, others, links: new Set() }));
      expect([lacking.reason, lacking.split, lacking.isLacking]).toEqual(['no-link', undefined, true]);
    },
  );

  it('whose pool cannot hold the prompt is not asked, however idle; who does not say its pool may be', () => {
    const decode = running(3, { role: 'decode' });
    const busy = { tokensAhead: 100 };
    const askedOf = (...others: Side[]) => decide(question({ decode, others, mode: 'always' })).split?.prefill.name;
    expect(askedOf(side(1, { maxTotalTokens: 1_601 }), side(2, { ...busy, maxTotalTokens: 1_602 }))).toBe('w2');
    expect(askedOf(side(1), side(2, { ...busy, maxTotalTokens: 1_602 }))).toBe('w1');
    // Layers that see windows hold longer ones in fewer blocks.
    expect(askedOf(side(1, { totalBlocks: 50, maxTotalTokens: 1_602 }))).toBe('w1');
    const lacking = decide(question({ decode, others: [side(1, { maxTotalTokens: 1_601 })] }));
    expect([lacking.reason, lacking.isLacking]).toEqual(['prefill-too-small', true]);
  });

  it('who holds all of the prompt says so behind its queue only: that counts', () => {
    const asked = (tokensAhead: number): Question =>
      question({ mode: 'always', others: [side(1, { held: 100, waiting: 1, tokensAhead })] });
    const [idle, queued] = [decide(asked(0)).split!, decide(asked(5_000)).split!];
    // Without a queue: half a step that runs, and 100 blocks that travel at 1,000 a second.
    expect([idle.firstS, idle.arrivedS, queued.firstS, queued.arrivedS]).toEqual([0.005, 0.1, 5, 5]);
    expect(queued.ttftS - idle.ttftS).toBeCloseTo(4.9, 9);
  });

  it('lacking: only where an idle worker would have been asked', () => {
    const decodeOf = (count: number, held: number) => running(count, { role: 'decode', match: matchOf(held) });
    const lacks = (decode: Side, part: Partial<Question> = {}) =>
      decide(question({ decode, others: [], ...part })).isLacking;
    expect([lacks(decodeOf(3, 0)), lacks(decodeOf(0, 99)), lacks(decodeOf(0, 0)), lacks(running(3))]).toEqual([
      ...[true, false, false, false],
    ]);
    expect(lacks(decodeOf(0, 99), { mode: 'always' })).toBe(true);
    expect(lacks(decodeOf(3, 0), { mode: 'never' })).toBe(false);
  });

  it('always: all blocks, at the best worker', () => {
    const others = [side(1, { tokensAhead: 100 }), side(2), side(3, { tokensAhead: 50 })];
    expect(decide(question({ mode: 'always', others }))).toMatchObject({
      reason: 'always',
      split: { blocks: 100, prefill: { name: 'w2' } },
    });
  });
});

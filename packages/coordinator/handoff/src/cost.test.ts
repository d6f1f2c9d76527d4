/** What a way to serve a request costs, by hand: what a first token is worth, and when. */
import { expect, it } from 'vitest';
import { decide } from './decision.ts';
import type { Side } from './question.ts';
import { question, side } from './testing/questions.ts';

const running = (count: number, part: Partial<Side> = {}): Side => side(0, { running: count, ...part });

it('a first token is worth less the sooner it would come anyway: a short prompt spares streams that are in time', () => {
  const decode = running(3, { role: 'decode' });
  const reason = (ttftS: number) => decide(question({ tokens: 65, decode, ttftS, itlS: 0.2 })).reason;
  // Alone 6.5 + 71.5 + 13 ms; split 64 + 4 + 14 + 4 ms, so that harm and the first token are of one kind.
  expect([reason(0.1), reason(2)]).toEqual(['sooner', 'sooner']);
  const others = [side(1, { tokensAhead: 30 })];
  const later = (ttftS: number) => decide(question({ tokens: 65, decode, others, ttftS, itlS: 0.2 })).reason;
  expect([later(0.13), later(2)]).toEqual(['alone', 'spares-streams']);
});

it('a first token is worth the more the longer it has been waited for: streams that are in time are not spared at any price', () => {
  const figures = { prefillTokensPerS: 3_300, stepS: 0.0035, stepPerRequestS: 0.0008 };
  const decode = running(8, { ...figures, role: 'decode' });
  const of = (tokensAhead: number) =>
    decide(question({ decode, others: [side(1, { ...figures, role: 'prefill', tokensAhead })], itlS: 0.072 }));
  expect(of(1_000)).toMatchObject({ reason: 'spares-streams' });
  // It would come 0.37 s later, in the middle of its target.
  const { reason, alone } = of(1_400);
  expect([reason, alone.misses]).toEqual(['alone', 0]);
  // What counts of its target is all that it waits, and no more than the target.
  const costS = (waitedS: number) => decide(question({ waitedS, ttftS: 2 })).alone.costS;
  const firstS = 1.601 + 0.01;
  expect(costS(0)).toBeCloseTo((firstS * firstS * 3) / 4 + firstS * 0.1, 9);
  expect(costS(2)).toBeCloseTo(firstS * 3.1, 9);
});

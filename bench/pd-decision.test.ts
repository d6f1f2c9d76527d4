/** What is told of a coordinator's decision to split: also what it gets wrong now and then. */
import { expect, it } from 'vitest';
import { decidedWays, decisionFigures, inTurn } from './pd-decision.ts';

const times = (count: number, ms: number): number[][] => Array.from({ length: count }, () => [ms]);

it('a decision that is wrong in four cases of ten is in the means, and in no median', () => {
  const lines: string[] = [];
  const short = { predicted: [...times(6, 10), ...times(4, 40)], always: times(10, 40), never: times(10, 10) };
  const figures = decisionFigures(10, new Map([['short', short]]), (line) => lines.push(line));
  expect(figures.map(({ name, value, limit, ratio }) => [name, value, limit, ratio])).toEqual([
    ['decision_10g', 10, 10, 1],
    ['mean_decision_10g', 22, 10, 10 / 22],
  ]);
  expect(lines).toEqual([
    'decision_10g short: decided 10.0 ms, always 40.0 ms, never 10.0 ms',
    'mean_decision_10g short: decided 22.0 ms, always 40.0 ms, never 10.0 ms',
  ]);
});

it('of several kinds the worst is told, for medians and for means each', () => {
  const mixed = { predicted: [[10, 30], [30]], always: [[20, 20], [27]], never: [[50, 50], [50]] };
  const warm = { predicted: [[10], [10], [40]], always: [[10], [10], [10]], never: [[20], [20], [20]] };
  const [byMedians, byMeans] = decisionFigures(1, new Map(Object.entries({ mixed, warm })), () => {});
  expect([byMedians!.value, byMedians!.limit]).toEqual([25, 23.5]);
  expect(byMedians!.limitName).toContain('mixed');
  expect([byMeans!.value, byMeans!.limit]).toEqual([20, 10]);
  expect(byMeans!.limitName).toContain('warm');
});

it('each round has all ways, and begins with another one', () => {
  expect([0, 1, 2, 3].map((round) => inTurn(decidedWays, round))).toEqual([
    ['predicted', 'always', 'never'],
    ['always', 'never', 'predicted'],
    ['never', 'predicted', 'always'],
    ['predicted', 'always', 'never'],
  ]);
});

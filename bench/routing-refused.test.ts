/** The replay refuses nobody: of each policy it is told how many a coordinator's queue would not have kept for so long. */
import { expect, it } from 'vitest';
import type { Outcome } from './routing/cluster.ts';
import { header, line, rowOf } from './routing/compare.ts';
import { hardware } from './routing/hardware.ts';

const outcome: Outcome = {
  ttftS: Float64Array.of(31, 0.1, 30, 40, 29.9),
  ...{ makespanS: 50, promptTokens: 100, tokensPerS: 2, saturatedTokensPerS: 2, localTokens: 0, hostTokens: 0 },
  ...{ peerTokens: 0, copiedTokens: 0, imbalance: 1, decisionUs: new Float64Array(5), indexBytes: 0 },
};

it('the share of first tokens that come later than a request may wait in service stands beside p90 and throughput', () => {
  const row = rowOf('sticky', 'twice', hardware, outcome);
  expect(row.lateShare).toBe(2 / 5);
  expect(line(row)).toContain('40.0 %');
  expect(line(row)).toHaveLength(header.length);
});

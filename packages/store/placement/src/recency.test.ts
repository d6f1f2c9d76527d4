/** Which tiers hear of which blocks that were used. */
import type { HashKey } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { Counters } from './counters.ts';
import { defaultLimits } from './limits.ts';
import { Recency } from './recency.ts';
import { Residency } from './residency.ts';
import { chain, namespaceNamed } from './testing/bench.ts';
import { ManualClock } from './testing/model.ts';

it('a long chain of which it is not said where its blocks are is told to their tiers, also behind a gap', () => {
  const n = namespaceNamed('n');
  const [all, others] = [chain('x', 300), chain('y', 300)];
  const residency = new Residency();
  const [arena, disk] = [1, 2];
  for (const hash of all) if (hash !== 'x10') residency.set(n, hash, arena);
  for (const hash of others) residency.set(n, hash, disk);
  const heard: HashKey[][] = [[], []];
  const tiers = heard.map((each) => ({ touch: (_: unknown, hashes: readonly HashKey[]) => void each.push(...hashes) }));
  const clock = new ManualClock();
  const limits = defaultLimits(1 << 30);
  const recency = new Recency({ tiers, residency, clock, limits, counters: new Counters() });
  residency.lookup(n, others, 0xff, 0); // leaves in the index's hands what it found
  recency.used(n, all, all.length);
  while (clock.pending > 0) clock.advance(0);
  expect(heard.map((each) => each.length)).toEqual([299, 0]);
  expect(new Set(heard[0])).toEqual(new Set(all.filter((hash) => hash !== 'x10')));
});

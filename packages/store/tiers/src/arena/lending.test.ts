/** What slots on loan cost the blocks of an arena. */
import { expect, it } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';

it('of many sizes evict no more blocks than there are loans', () => {
  const bench = new TestBench(64 << 20);
  const { tier } = bench;
  const space = namespaceNamed('lending');
  const payloadBytes = 500_000;
  for (let at = 0; tier.stats().evictions === 0; at++) {
    const slot = tier.allocate(space, payloadBytes)!;
    tier.publish(space, { hash: hashNamed(at), parent: null, tokenCount: 16, payloadBytes, checksum: 0n }, slot);
  }
  const { evictions } = tier.stats();
  const loans = Array.from({ length: 27 }, (_, at) => tier.lend(space, (59 + at) * 4_096)!);
  expect(tier.stats().evictions - evictions).toBe(loans.length);
  for (const [at, slot] of loans.entries()) expect(tier.slotBytesOf(slot)).toBeGreaterThanOrEqual((59 + at) * 4_096);
  for (const slot of loans) tier.free(slot);
  tier.checkIntegrity();
  bench.dispose();
});

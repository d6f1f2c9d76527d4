import type { HashKey, Namespace } from '@kvtier/identity';
import { Followers, type Tier } from '@kvtier/tiers';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Counters } from './counters.ts';
import { Deadlines } from './deadlines.ts';
import { Residency } from './residency.ts';
import { namespaceNamed } from './testing/bench.ts';
import { ManualClock } from './testing/model.ts';
import { TierTtl } from './tier-ttl.ts';

const nameOf = (row: number): HashKey => `row ${row}`.padEnd(32, '\xff') as HashKey;

it('a random life is what a map says: each row once, at its last second, however few steps a turn has', () => {
  const step = fc.record({
    act: fc.constantFrom('set', 'set', 'set', 'delete', 'take', 'take'),
    // Rows of several chunks; seconds of every level, and near ones most of all.
    row: fc.oneof(
      fc.nat(20),
      fc.nat(9000).map((row) => row * 3),
    ),
    inS: fc.oneof(fc.nat(5), fc.nat(200), fc.nat(10_000), fc.nat(2 ** 31 - 1)),
    steps: fc.integer({ min: 1, max: 40 }),
  });
  fc.assert(
    fc.property(fc.nat(2 ** 31), fc.array(step, { maxLength: 200 }), (startS, life) => {
      const deadlines = new Deadlines(startS);
      const spaces = [namespaceNamed('n'), namespaceNamed('m')];
      const oracle = new Map<number, number>();
      let nowS = startS;
      for (const { act, row, inS, steps } of life) {
        if (act === 'set') {
          deadlines.set(row, spaces[row % 2]!, nameOf(row), nowS + inS, nowS);
          oracle.set(row, nowS + inS);
        } else if (act === 'delete') {
          deadlines.delete(row);
          oracle.delete(row);
        } else {
          nowS += Math.min(inS, 2 ** 31 - nowS); // ends stay below 2^32
          const taken: string[] = [];
          for (;;) {
            const count = Math.min(steps, 7);
            const part = [...deadlines.take(nowS, count, steps)].flatMap(([{ key }, hashes]) =>
              hashes.map((hash) => key + hash),
            );
            expect(part.length).toBeLessThanOrEqual(count);
            taken.push(...part);
            deadlines.checkIntegrity();
            if (deadlines.nextS > nowS) break;
          }
          const ended = [...oracle].filter(([, second]) => second <= nowS).map(([ended]) => ended);
          for (const each of ended) oracle.delete(each);
          expect(taken.sort()).toEqual(ended.map((each) => spaces[each % 2]!.key + nameOf(each)).sort());
        }
        expect(deadlines.count).toBe(oracle.size);
        const earliest = Math.min(...oracle.values());
        expect(deadlines.nextS).toBeLessThanOrEqual(earliest);
      }
    }),
    { numRuns: 200 },
  );
});

const median = (turns: readonly number[]): number => [...turns].sort((a, b) => a - b)[turns.length >> 1]!;
const week = 7 * 86_400;
const blockOf = (number: number): HashKey =>
  Buffer.from(Float64Array.of(number, number * 7, number * 13, number * 17).buffer).toString('latin1') as HashKey;

/** A disk of so many blocks that is always full: each block that comes pushes out the oldest one. */
function churn(held: number, perSecond: number, seconds: number, onSecond: (ttl: TierTtl) => void): TierTtl {
  const namespace: Namespace = namespaceNamed('n');
  const followers = new Followers();
  const clock = new ManualClock();
  const residency = new Residency();
  let removed = 0;
  const tier = {
    name: 'disk',
    follow: (listener) => followers.follow(listener, []),
    remove: (_, hashes) => {
      followers.removed(namespace, hashes);
      removed += hashes.length;
      return hashes.length;
    },
  } as Partial<Tier> as Tier;
  const ttl = new TierTtl(tier, week, clock, 256, new Counters());
  residency.follow(tier, 1, (...change) => ttl.changed(...(change.slice(0, 4) as Parameters<TierTtl['changed']>)));
  let next = 0;
  for (; next < held; next++) followers.stored(namespace, [blockOf(next)]);
  for (let second = 0; second < seconds; second++) {
    for (let i = 0; i < perSecond; i++, next++) {
      followers.stored(namespace, [blockOf(next)]);
      followers.removed(namespace, [blockOf(next - held)]);
    }
    clock.advance(1000);
    onSecond(ttl);
  }
  expect([removed, ttl.count]).toEqual([0, held]);
  clock.advance(week * 1000);
  while (ttl.count > 0) clock.advance(1);
  expect([removed, clock.pending]).toEqual([held, 0]);
  ttl.checkIntegrity();
  return ttl;
}

/** A million blocks for a week: `npm run sim -- --churn`. */
it('memory is that of what the tier holds, not of what has passed through it', () => {
  const held = 4_000;
  const bytes: number[] = [];
  churn(held, 500, 150, (ttl) => bytes.push(ttl.bytes));
  const most = (sizes: readonly number[]): number => sizes.reduce((a, b) => Math.max(a, b), 0);
  expect(most(bytes) / held).toBeLessThan(100);
  expect(bytes.at(-1)).toBeLessThanOrEqual(most(bytes.slice(0, 40)));
});

it('one that is left of a hundred thousand takes the memory of a few', () => {
  const namespace = namespaceNamed('n');
  const deadlines = new Deadlines(0);
  const emptyBytes = deadlines.bytes;
  const count = 100_000;
  for (let record = 0; record < count; record++) deadlines.set(record, namespace, blockOf(record), week, 0);
  expect(deadlines.bytes - emptyBytes).toBeLessThan(67 * count);
  for (let record = 1; record < count; record++) deadlines.delete(record);
  expect(deadlines.bytes - emptyBytes).toBeLessThan(256 << 10); // it has the first chunk of rows
  deadlines.checkIntegrity();
  deadlines.delete(0);
  expect(deadlines.bytes).toBe(emptyBytes);
});

it('what is set anew has its new name and second alone', () => {
  const [n, m] = [namespaceNamed('n'), namespaceNamed('m')];
  const deadlines = new Deadlines(0);
  deadlines.set(7, n, nameOf(7), 100, 0);
  deadlines.set(8, n, nameOf(8), 100, 0);
  deadlines.set(7, m, 'short' as HashKey, 5_000, 0);
  expect(deadlines.count).toBe(2);
  deadlines.checkIntegrity();
  expect([...deadlines.take(100, 9, 99)]).toEqual([[n, [nameOf(8)]]]);
  deadlines.checkIntegrity();
  expect([...deadlines.take(5_000, 9, 99)]).toEqual([[m, ['short']]]);
  expect(deadlines.nextS).toBe(Number.POSITIVE_INFINITY);
});

it('a turn of blocks that end takes no longer for all the seconds that are queued', () => {
  const namespace = namespaceNamed('n');
  const deadlines = new Deadlines(0);
  for (let second = 1; second <= week; second += 4) deadlines.set(second, namespace, blockOf(second), second, 0);
  const turnsMs: number[] = [];
  for (let nowS = 1; nowS <= 2_000; nowS += 4) {
    const startMs = performance.now();
    expect([...deadlines.take(nowS, 256, 4096).values()].flat()).toHaveLength(1);
    turnsMs.push(performance.now() - startMs);
  }
  expect(median(turnsMs)).toBeLessThan(10); // a sort of all seconds took 230
});

it('a hundred thousand that end in one second go batch by batch, and no turn is long', () => {
  const namespace = namespaceNamed('n');
  const deadlines = new Deadlines(0);
  const count = 100_000;
  for (let row = 0; row < count; row++) deadlines.set(row, namespace, blockOf(row), week, 0);
  const turnsMs: number[] = [];
  let taken = 0;
  for (let turn = 0; deadlines.nextS <= week; turn++) {
    const startMs = performance.now();
    for (const hashes of deadlines.take(week, 256, 4096).values()) taken += hashes.length;
    turnsMs.push(performance.now() - startMs);
    expect(turn).toBeLessThan(2 * (count / 256 + count / 4096 + 64));
  }
  expect([taken, deadlines.count]).toEqual([count, 0]);
  expect(median(turnsMs)).toBeLessThan(10);
});

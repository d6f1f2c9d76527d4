/** Whether somebody else uses a server: as a naive reading of all looks says it, and never on what is old. */
import { native } from '@kvtier/data-plane';
import fc from 'fast-check';
import { afterEach, expect, it, vi } from 'vitest';
import { foreignCalls, OthersWatch, OtherUsers } from './other-users.ts';

afterEach(() => {
  vi.useRealTimers();
});

it('calls of commands that a node sends, too, are nobody else’s', () => {
  const stats = [
    '# Commandstats',
    'cmdstat_get:calls=17,usec=30,usec_per_call=1.76,rejected_calls=0,failed_calls=0',
    'cmdstat_getrange:calls=900000,usec=9,usec_per_call=0.00,rejected_calls=0,failed_calls=0',
    'cmdstat_evalsha:calls=400,usec=9,usec_per_call=0.00,rejected_calls=0,failed_calls=0',
    'cmdstat_config|get:calls=5,usec=9,usec_per_call=0.00,rejected_calls=0,failed_calls=0',
    'cmdstat_object|freq:calls=3,usec=9,usec_per_call=0.00,rejected_calls=0,failed_calls=0',
    'cmdstat_mget:calls=x,usec=9',
    'cmdstat_lpush:calls=99999999999999999999,usec=9',
  ];
  expect(foreignCalls(stats.join('\r\n'))).toBe(20);
  expect(foreignCalls('')).toBe(0);
  const most = Array.from({ length: 10 }, (_, i) => `cmdstat_x${i}:calls=999999999999999,`);
  expect(() => foreignCalls(most.join('\n'))).toThrow('counts more than there can be');
});

it('somebody is there for 0.3 s after 50 calls a second, and while nothing is known', () => {
  const step = fc.record({
    afterMs: fc.integer({ min: 0, max: 900 }),
    calls: fc.integer({ min: -5, max: 60 }),
    looks: fc.boolean(),
  });
  const property = fc.property(fc.array(step, { maxLength: 40 }), (steps) => {
    const others = new OtherUsers();
    const looks: { calls: number; ms: number }[] = [];
    let [nowMs, calls] = [0, 1_000];
    for (const { afterMs, calls: more, looks: isLook } of steps) {
      nowMs += afterMs;
      calls = more < 0 ? 0 : calls + more;
      if (isLook) {
        others.note(calls, nowMs);
        const last = looks.at(-1);
        if (last === undefined || last.calls > calls || nowMs - last.ms >= 20) looks.push({ calls, ms: nowMs });
      }
      // From all looks anew: pairs of them that tell of the time between.
      const told = looks.slice(1).flatMap(({ calls, ms }, i) => {
        const since = looks[i]!;
        if (calls < since.calls) return [];
        const isAnybody = (calls - since.calls) * 1_000 >= 50 * (ms - since.ms);
        return isAnybody && ms - since.ms > 500 ? [] : [{ ms, isAnybody }];
      });
      const known = told.some(({ ms }) => nowMs - ms <= 500);
      const seen = told.some(({ ms, isAnybody }) => isAnybody && nowMs - ms < 300);
      expect(others.areHere(nowMs)).toBe(!known || seen);
    }
  });
  fc.assert(property, { numRuns: 500 });
});

it('looks go one after the other while it is on, and what cannot be had is no knowledge', async () => {
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout', 'performance'] });
  const told: boolean[] = [];
  let calls = 0;
  let looks = 0;
  let answer: 'now' | 'never' | 'error' = 'now';
  const count = async (): Promise<number> => {
    looks++;
    if (answer === 'error') throw new Error('no INFO for you');
    return answer === 'now' ? calls : new Promise<number>(() => {});
  };
  const watch = new OthersWatch(count, (areHere) => told.push(areHere));
  watch.start();
  watch.start();
  await vi.advanceTimersByTimeAsync(24);
  expect([looks, told]).toEqual([1, []]);
  await vi.advanceTimersByTimeAsync(976);
  expect([looks, told]).toEqual([11, [false]]);
  calls += 5; // of 100 ms
  await vi.advanceTimersByTimeAsync(100);
  expect(told).toEqual([false, true]);
  await vi.advanceTimersByTimeAsync(300);
  expect(told).toEqual([false, true, false]);
  answer = 'error';
  await vi.advanceTimersByTimeAsync(700);
  expect(told).toEqual([false, true, false, true]);
  answer = 'now';
  await vi.advanceTimersByTimeAsync(100);
  expect(told.at(-1)).toBe(false);
  // Off: nothing is looked at, and what was known is too old when it goes on.
  watch.stop();
  const before = looks;
  await vi.advanceTimersByTimeAsync(5_000);
  expect(looks).toBe(before);
  // A long time without anybody is knowledge, one with somebody is none.
  watch.start();
  await vi.advanceTimersByTimeAsync(0);
  expect([looks - before, told.at(-1)]).toEqual([1, false]);
  watch.stop();
  await vi.advanceTimersByTimeAsync(5_000);
  calls += 1_000;
  watch.start();
  await vi.advanceTimersByTimeAsync(0);
  expect([looks - before, told.at(-1)]).toEqual([2, true]);
  await vi.advanceTimersByTimeAsync(25);
  expect([looks - before, told.at(-1)]).toEqual([3, false]);
  watch.stop();
  await vi.advanceTimersByTimeAsync(5_000);
  answer = 'never';
  watch.start();
  watch.stop();
  watch.start();
  await vi.advanceTimersByTimeAsync(5_000);
  expect([looks - before, told.at(-1)]).toEqual([4, true]);
  watch.stop();
});

const kib = 1 << 10;
const sizes = [32, 48, 64, 96, 128, 192, 256, 384, 512].map((size) => size * kib);

it('a shared server’s pieces come to rest at one that takes 50 us at most, whatever a piece and a byte cost', () => {
  const property = fc.property(
    fc.double({ min: 0, max: 48, noNaN: true }),
    fc.double({ min: 100, max: 20_000, noNaN: true }),
    fc.constantFrom(...sizes),
    (pieceUs, bytesPerUs, first) => {
      const usOf = (bytes: number): number => pieceUs + bytes / bytesPerUs;
      const met: number[] = [first];
      while (met.at(-1) !== met.at(-2)) {
        met.push(native.valuesPieceAfter(met.at(-1)!, usOf(met.at(-1)!)));
        expect(met.length).toBeLessThan(sizes.length + 3);
      }
      const rest = met.at(-1)!;
      expect(sizes).toContain(rest);
      // One way, up or down, and no further than all sizes tried one by one would go.
      expect([met.toSorted((a, b) => a - b), met.toSorted((a, b) => b - a)]).toContainEqual(met);
      const fitting = sizes.filter((size) => usOf(size) <= 50);
      expect(rest).toBeLessThanOrEqual(fitting.at(-1) ?? sizes[0]!);
      if (rest > sizes[0]!) expect(usOf(rest)).toBeLessThanOrEqual(50);
    },
  );
  fc.assert(property, { numRuns: 500 });
  expect(native.valuesPieceAfter(1 << 20, 0)).toBe(512 * kib);
  expect(native.valuesPieceAfter(32 * kib, 1e9)).toBe(32 * kib);
});

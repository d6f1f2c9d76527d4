/** What clients count of answers that end, that stand still, and that never begin. */
import { expect, it } from 'vitest';
import { Counting } from './counting.ts';

const window = { fromMs: 1_000, toMs: 2_000 };
const stillMs = 500;

it('first tokens, tokens behind them and their ways count while the time counts', () => {
  const counting = new Counting(window);
  const reader = counting.begin(900);
  reader.token(10_000, 990); // too early
  reader.token(20_000, 1_200);
  const second = counting.begin(1_300);
  second.token(30_000, 1_350);
  for (const each of [reader, second]) each.end();
  counting.begin(1_990).token(40_000, 2_010); // too late
  expect(counting.end(stillMs)).toBe(0);
  expect(counting.tokens).toBe(2);
  expect(counting.first.told).toEqual({ count: 1, p50: 50, p90: 50, p99: 50, p999: 50 });
  expect(counting.gaps.told).toEqual({ count: 1, p50: 210, p90: 210, p99: 210, p999: 210 });
  expect(counting.way.told).toEqual({ count: 2, p50: 20, p90: 30, p99: 30, p999: 30 });
});

it('what is awaited at the end counts as long as it was awaited, and hangs where that was long', () => {
  const counting = new Counting(window);
  counting.begin(1_400); // no first token in 600 ms
  counting.begin(1_970);
  const stalled = counting.begin(950);
  stalled.token(0, 960); // and nothing in 1,040 ms
  const running = counting.begin(1_800);
  running.token(0, 1_810);
  expect(counting.end(stillMs)).toBe(2);
  expect(counting.first.told).toEqual({ count: 3, p50: 30, p90: 600, p99: 600, p999: 600 });
  expect(counting.gaps.told).toEqual({ count: 2, p50: 190, p90: 1_040, p99: 1_040, p999: 1_040 });
});

it('no time is told of what had to wait for the bench itself; its tokens count', () => {
  const counting = new Counting(window);
  const reader = counting.begin(1_100);
  counting.skipUntil(1_500);
  reader.token(0, 1_400);
  reader.token(0, 1_600);
  reader.end();
  expect(counting.end(stillMs)).toBe(0);
  expect(counting.tokens).toBe(2);
  expect([counting.first.told.count, counting.gaps.told]).toEqual([
    0,
    { count: 1, p50: 200, p90: 200, p99: 200, p999: 200 },
  ]);
});

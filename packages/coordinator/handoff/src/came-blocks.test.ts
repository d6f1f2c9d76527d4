/** Blocks that came to a node while one hand-off waited, of all others. */
import { expect, it } from 'vitest';
import { OthersCame } from './came-blocks.ts';

it('others count from the first block that is ready until the last one that comes, own ones never', () => {
  const all = { sum: 7 };
  const [a, b] = [new OthersCame(all), new OthersCame(all)];
  b.came(5, 50);
  a.begins(100);
  b.begins(120);
  a.came(10, 200);
  b.came(20, 300);
  a.came(10, 300);
  b.came(40, 400);
  // Of a's last report the moment is known: 40 more came since, a quarter of the time to now before its last block.
  expect([a.until(300, 700), a.until(400, 700), a.until(700, 700)]).toEqual([20, 30, 60]);
  expect([b.until(400, 700), b.until(700, 700)]).toEqual([20, 20]);
});

it('however long the rest of a prompt takes, and however much others have meanwhile: that came behind it', () => {
  const all = { sum: 0 };
  const [a, b] = [new OthersCame(all), new OthersCame(all)];
  a.begins(0);
  b.came(100, 59_999);
  a.came(100, 60_000);
  for (let ms = 60_000; ms < 600_000; ms++) b.came(1, ms);
  expect(a.until(60_000, 600_000)).toBe(100);
  expect(a.until(60_001, 600_000)).toBe(101);
});

it.each([
  ['no time lies between', 10, 10],
  ['it is told before it came', 20, 10],
])('all that has come counts where %s', (_, ms, nowMs) => {
  const all = { sum: 0 };
  const [a, b] = [new OthersCame(all), new OthersCame(all)];
  a.begins(10);
  b.came(3, 10);
  expect(a.until(ms, nowMs)).toBe(3);
});

it('what came before the last report is not lost where clocks say otherwise', () => {
  const all = { sum: 0 };
  const [a, b] = [new OthersCame(all), new OthersCame(all)];
  a.begins(0);
  b.came(3, 10);
  a.came(1, 10);
  b.came(3, 15);
  expect(a.until(5, 20)).toBe(3);
});

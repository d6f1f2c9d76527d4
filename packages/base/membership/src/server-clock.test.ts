/** When a server's clock counts as having gone ahead. */
import { expect, it } from 'vitest';
import { ServerClock } from './server-clock.ts';

it('its clock goes ahead, and neither the time that passed nor the time that an answer took counts', () => {
  const clock = new ServerClock();
  expect(clock.wentAhead(1_000_000, 0, 5)).toBe(false);
  expect(clock.wentAhead(1_000_200, 200, 205)).toBe(false);
  // It was asked, and stood still; then it read its clock and answered.
  expect(clock.wentAhead(1_009_000, 400, 9_000)).toBe(false);
  expect(clock.wentAhead(1_069_000, 69_000, 69_001)).toBe(false);
  expect(clock.wentAhead(1_069_700, 69_200, 69_205)).toBe(true);
  expect(clock.wentAhead(1_069_900, 69_400, 69_405)).toBe(false);
  // Back, and ahead again.
  expect(clock.wentAhead(1_060_000, 69_600, 69_605)).toBe(false);
  expect(clock.wentAhead(1_070_000, 69_800, 69_805)).toBe(true);
});

import { expect, it } from 'vitest';
import { Breaker } from './breaker.ts';

const limits = { breakerFailures: 3, breakerOpenMs: 100, breakerMaxOpenMs: 300 };
const ms = 1000;

it('opens after failures in a row, and a success between them starts anew', () => {
  const breaker = new Breaker(limits);
  expect([breaker.failed(0, 'x'), breaker.failed(0, 'x')]).toEqual([false, false]);
  breaker.succeeded();
  expect([1, 2, 3].map(() => breaker.failed(5 * ms, 'slow'))).toEqual([false, false, true]);
  expect([breaker.state(5 * ms), breaker.reason, breaker.opened]).toEqual(['open', 'slow', 1]);
  expect(breaker.state(104.999 * ms)).toBe('open');
  expect(breaker.state(105 * ms)).toBe('half_open');
});

it('a failed probe opens it for twice as long, up to its limit; a good one closes it', () => {
  const breaker = new Breaker(limits);
  for (let i = 0; i < 3; i++) breaker.failed(0, 'x');
  expect(breaker.failed(50 * ms, 'late')).toBe(false); // a read that began before it opened
  expect(breaker.state(100 * ms)).toBe('half_open');
  expect(breaker.failed(100 * ms, 'x')).toBe(true);
  expect([breaker.state(299 * ms), breaker.state(300 * ms)]).toEqual(['open', 'half_open']);
  breaker.failed(300 * ms, 'x');
  expect([breaker.state(599 * ms), breaker.state(600 * ms)]).toEqual(['open', 'half_open']);
  breaker.succeeded();
  expect([breaker.state(600 * ms), breaker.reason, breaker.opened]).toEqual(['closed', '', 3]);
});

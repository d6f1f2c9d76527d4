/** When a pod whose requests fail gets nothing, and when one again. */
import { expect, it } from 'vitest';
import { RequestFailures } from './request-failures.ts';

const others = (): boolean => true;
const nobody = (): boolean => false;

it('three in a row are a reason to rest, twice as long each time, and one request shows whether it is over', () => {
  const failures = new RequestFailures();
  expect([failures.failed(0, others), failures.failed(0, others)]).toEqual([0, 0]);
  failures.succeeded();
  expect([0, 1, 2].map(() => failures.failed(0, others))).toEqual([0, 0, 1_000]);
  expect(failures.failed(999, others)).toBe(0); // sent before
  expect([failures.sent(999, others), failures.isResting(999), failures.isResting(1_000)]).toEqual([0, true, false]);
  let nowMs = 1_000;
  for (const [triedMs, restMs] of [
    [1_000, 2_000],
    [2_000, 4_000],
    [4_000, 8_000],
    [8_000, 16_000],
    [16_000, 30_000],
    [30_000, 30_000],
  ] as const) {
    expect([failures.sent(nowMs, others), failures.isResting(nowMs)]).toEqual([triedMs, true]);
    expect(failures.failed(nowMs + 1, others)).toBe(restMs);
    nowMs += 1 + restMs;
  }
  failures.sent(nowMs, others);
  failures.succeeded();
  expect([failures.inRow, failures.isResting(nowMs), failures.sent(nowMs, others)]).toEqual([0, false, 0]);
});

it('of a request that was tried and never ended others are tried after as long again', () => {
  const failures = new RequestFailures();
  for (let i = 0; i < 3; i++) failures.failed(0, others);
  expect([failures.sent(1_000, others), failures.isResting(1_999), failures.sent(2_000, others)]).toEqual([
    1_000,
    true,
    1_000,
  ]);
});

it('whom nobody can stand in for never rests, and one that is needed is woken', () => {
  const failures = new RequestFailures();
  for (let i = 0; i < 10; i++) expect(failures.failed(0, nobody)).toBe(0);
  expect(failures.failed(0, others)).toBe(1_000);
  failures.woken();
  expect([failures.isResting(1), failures.sent(1, nobody), failures.isResting(1)]).toEqual([false, 0, false]);
});

import { expect, it } from 'vitest';
import { Deafness, firstAnewMs, maxAnewMs } from './deafness.ts';

function connected(): Deafness {
  const deafness = new Deafness();
  deafness.connected(0);
  return deafness;
}

it('a quiet publisher is never connected to anew', () => {
  const deafness = connected();
  for (let ms = 1_000; ms < 3_600_000; ms += 5_000) {
    deafness.probed(ms, 0);
    expect(deafness.isDue(ms)).toBe(false);
  }
});

it('two probes that bring what did not come: anew, once; what comes between them says that it hears', () => {
  const deafness = connected();
  deafness.probed(1_000, 1);
  expect(deafness.isDue(1_000)).toBe(false);
  deafness.heard();
  deafness.probed(2_000, 3);
  expect(deafness.isDue(2_000)).toBe(false);
  deafness.probed(3_000, 0); // nothing was said: that says nothing
  deafness.probed(4_000, 1);
  expect([deafness.isDue(4_000), deafness.isDue(4_000)]).toEqual([true, false]);
});

it('what is missed before the subscription can have arrived does not count, nor while there is no connection', () => {
  const deafness = new Deafness();
  for (const ms of [0, 100_000, 200_000]) deafness.probed(ms, 1);
  expect(deafness.isDue(200_000)).toBe(false);
  deafness.connected(200_000);
  for (const ms of [200_000, 200_500, 200_999]) deafness.probed(ms, 1);
  expect(deafness.isDue(201_000)).toBe(false);
  for (const ms of [201_000, 202_000]) deafness.probed(ms, 1);
  expect(deafness.isDue(202_000)).toBe(true);
});

it('one that stays deaf is connected to ever more rarely, once a minute in the end; heard, it begins again', () => {
  const deafness = connected();
  const dueMs: number[] = [];
  const listen = (fromMs: number, untilMs: number): void => {
    for (let ms = fromMs; ms < untilMs; ms += 1_000) {
      deafness.probed(ms, 1);
      if (!deafness.isDue(ms)) continue;
      dueMs.push(ms);
      deafness.connected(ms);
    }
  };
  listen(1_000, 400_000);
  const pauses = dueMs.slice(1).map((ms, i) => ms - dueMs[i]!);
  expect([dueMs[0], pauses]).toEqual([2_000, [5_000, 10_000, 20_000, 40_000, ...Array(5).fill(maxAnewMs)]]);
  deafness.heard();
  dueMs.length = 0;
  listen(500_000, 510_000);
  expect(dueMs).toEqual([501_000, 501_000 + firstAnewMs]);
});

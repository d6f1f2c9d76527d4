import type { HashKey } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { createAdmission, SecondTouch } from './admission.ts';

const named = (number: number): HashKey => `block ${number}` as HashKey;

it('always admits always', () => {
  const policy = createAdmission('always', 0);
  expect([0, 0, 1].map((n) => policy.admit('s', named(n), 1, 0))).toEqual([true, true, true]);
});

it('second-touch admits every second use, per namespace, and forgets what it admitted', () => {
  const policy = createAdmission('second-touch', 0);
  const uses = [0, 1, 0, 0, 1, 0].map((n) => policy.admit('s', named(n), 1, 0));
  expect(uses).toEqual([false, false, true, false, true, true]);
  expect(policy.admit('t', named(7), 1, 0)).toBe(false);
  expect(policy.admit('s', named(7), 1, 0)).toBe(false);
});

it('second-touch remembers most of the last 100,000 names, in bounded memory, and forgets old ones', () => {
  const policy = createAdmission('second-touch', 0);
  const count = 100_000;
  let falselyAdmitted = 0;
  for (let n = 0; n < count; n++) if (policy.admit('s', named(n), 1, 0)) falselyAdmitted++;
  expect(falselyAdmitted).toBeLessThan(10); // another name with the same fingerprint
  let remembered = 0;
  for (let n = 0; n < count; n++) if (policy.admit('s', named(n), 1, 0)) remembered++;
  expect(remembered).toBeGreaterThan(count * 0.9);
  for (let n = count; n < 12 * count; n++) policy.admit('s', named(n), 1, 0);
  policy.admit('s', named(-1), 1, 0);
  expect(policy.admit('s', named(count), 1, 0)).toBe(false);
});

it('second-touch remembers as many names as the arena above gives cause for, and tells them apart as well', () => {
  const policy = createAdmission('second-touch', 64 * 2 ** 30);
  const distance = 1_000_000;
  const again = 1_000;
  let falselyAdmitted = 0;
  for (let n = 0; n < distance; n++) if (policy.admit('s', named(n), 1, 0)) falselyAdmitted++;
  expect(falselyAdmitted).toBeLessThan(10);
  let remembered = 0;
  for (let n = 0; n < again; n++) if (policy.admit('s', named(n), 1, 0)) remembered++;
  expect(remembered).toBeGreaterThan(again * 0.9);
});

it.each([
  { gibibytes: 0, names: 2 ** 18 },
  { gibibytes: 1, names: 2 ** 18 },
  { gibibytes: 64, names: 2 ** 21 },
])('second-touch below an arena of $gibibytes GiB remembers $names names, and no more', ({ gibibytes, names }) => {
  expect(new SecondTouch(gibibytes * 2 ** 30).names).toBe(names);
});

it.each([1, 4, 7])('second-touch below an arena whose names fill no whole sets by %d remembers, too', (more) => {
  const policy = new SecondTouch((2 ** 18 + more) * 2 ** 15);
  expect(policy.names).toBe(2 ** 18);
  expect([0, 1, 0, 1].map((n) => policy.admit('s', named(n)))).toEqual([false, false, true, true]);
});

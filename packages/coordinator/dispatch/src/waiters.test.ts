import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Pending } from './pending.ts';
import { request } from './testing/dispatcher-rig.ts';
import { Waiters } from './waiters.ts';

const numbers = [0, 1, 2, 3, 4, 5, 6, 7];
const allowedOf = (waiters: Waiters, pending: Pending): number[] => {
  const allowed = waiters.allowedOf(pending);
  return numbers.filter((number) => allowed.has(number));
};

const step = fc.oneof(
  fc.record({ kind: fc.constant('comes' as const), may: fc.subarray(numbers) }),
  fc.record({ kind: fc.constant('becomes' as const), members: fc.subarray(numbers), other: fc.subarray(numbers) }),
  fc.record({ kind: fc.constant('asked' as const), at: fc.nat(20) }),
  fc.record({ kind: fc.constant('checks' as const), checks: fc.nat(2) }),
);

it('knows who may have which worker, and who has nobody, in whatever parts it is told', () => {
  fc.assert(
    fc.property(fc.array(step, { minLength: 5, maxLength: 60 }), (steps) => {
      const may = new Map<Pending, Set<number>>();
      // A worker that is another one is one that those may have who might not, and the other way round.
      const flipped = new Set<number>();
      const mayHave = (pending: Pending, number: number): boolean =>
        may.get(pending)!.has(number) !== flipped.has(number);
      const waiters = new Waiters(mayHave);
      let members: number[] = [];
      const expected = (pending: Pending): number[] => members.filter((number) => mayHave(pending, number));
      const check = (checks: number): void => {
        let left = checks;
        for (const lost of waiters.lost(() => left-- <= 0)) {
          expect(expected(lost)).toEqual([]);
          waiters.delete(lost);
          may.delete(lost);
        }
      };
      for (const one of steps) {
        if (one.kind === 'comes')
          for (let i = 0; i < 12; i++) {
            const pending = new Pending(request(), 1);
            may.set(pending, new Set(one.may));
            expect(allowedOf(waiters, pending)).toEqual(expected(pending));
            waiters.add(pending);
          }
        else if (one.kind === 'becomes') {
          const changed = numbers.filter(
            (n) => members.includes(n) !== one.members.includes(n) || one.other.includes(n),
          );
          for (const number of one.other) if (!flipped.delete(number)) flipped.add(number);
          members = one.members;
          waiters.become(members, changed);
        } else if (one.kind === 'asked') {
          const pending = [...waiters][one.at];
          if (pending !== undefined) expect(allowedOf(waiters, pending)).toEqual(expected(pending));
        } else check(one.checks);
      }
      // Those that came when nobody was there are told with the next change.
      for (const number of numbers) if (!flipped.delete(number)) flipped.add(number);
      waiters.become(members, numbers);
      if (members.length > 0) check(Number.POSITIVE_INFINITY);
      if (members.length > 0) expect(waiters.isChecked).toBe(true);
      for (const pending of waiters) expect(allowedOf(waiters, pending)).toEqual(expected(pending));
    }),
    { numRuns: 200 },
  );
});

it('tells them a part at a time, and of many changes at once, too', () => {
  const waiters = new Waiters((_pending, number) => number !== 1);
  waiters.become([0, 1], [0, 1]);
  const all = Array.from({ length: 100 }, () => new Pending(request(), 1));
  for (const pending of all) {
    waiters.allowedOf(pending);
    waiters.add(pending);
  }
  for (let i = 0; i < 2_000; i++) waiters.become([1], [0]);
  const parts: number[] = [];
  while (!waiters.isChecked) {
    const lost = [...waiters.lost(() => true)];
    parts.push(lost.length);
    for (const pending of lost) waiters.delete(pending);
  }
  expect([parts.reduce((sum, n) => sum + n, 0), Math.max(...parts) <= 16, waiters.size]).toEqual([100, true, 0]);
});

it('comes to all of them, each time a part further', () => {
  const waiters = new Waiters(() => true);
  waiters.become([0, 1], [0, 1]);
  for (let i = 0; i < 100; i++) waiters.add(new Pending(request(), 1));
  waiters.become([0], [1]);
  let parts = 0;
  for (; !waiters.isChecked && parts < 100; parts++) expect([...waiters.lost(() => true)]).toEqual([]);
  expect(parts).toBe(7); // of 16 each
});

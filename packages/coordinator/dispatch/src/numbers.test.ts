import fc from 'fast-check';
import { expect, it } from 'vitest';
import { Numbers } from './numbers.ts';

const some = fc.array(fc.nat(200), { maxLength: 12 });
const numbersOf = (all: readonly number[]): Numbers => {
  const numbers = new Numbers();
  for (const number of all) numbers.set(number, true);
  return numbers;
};

it('is a set of numbers', () => {
  fc.assert(
    fc.property(some, some, some, (first, second, gone) => {
      const [a, b] = [numbersOf(first), numbersOf(second)];
      const left = new Set(first);
      for (const number of gone) {
        a.set(number, false);
        left.delete(number);
      }
      const others = new Set(second);
      for (let number = 0; number <= 200; number++) expect(a.has(number)).toBe(left.has(number));
      expect(a.isEmpty).toBe(left.size === 0);
      expect(a.meets(b)).toBe([...left].some((number) => others.has(number)));
      expect(a.exceeds(b)).toBe([...left].some((number) => !others.has(number)));
      b.copy(a);
      expect([b.exceeds(a), a.exceeds(b)]).toEqual([false, false]);
      b.clear();
      expect(b.isEmpty).toBe(true);
    }),
  );
});

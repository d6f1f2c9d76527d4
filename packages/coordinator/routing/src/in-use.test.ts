import fc from 'fast-check';
import { expect, it } from 'vitest';
import { InUse } from './in-use.ts';
import { keysOf, naiveCommon } from './testing/chains.ts';

it('knows how much of a prompt the requests have that are at a worker, whatever came and went', () => {
  const prompt = fc.array(fc.nat(1), { maxLength: 8 });
  const step = fc.record({ prompt, worker: fc.nat(2), ends: fc.nat(40), leaves: fc.nat(30) });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 40 }), prompt, (steps, asked) => {
      const inUse = new InUse();
      const there = new Map<number, { readonly worker: number; readonly prompt: readonly number[] }>();
      for (const [i, { prompt: one, worker, ends, leaves }] of steps.entries()) {
        inUse.given(i, keysOf(one), worker);
        there.set(i, { worker, prompt: one });
        inUse.ended(ends);
        there.delete(ends);
        if (leaves > 2) continue;
        inUse.left(leaves);
        for (const [item, given] of there) if (given.worker === leaves) there.delete(item);
      }
      for (const worker of [0, 1, 2]) {
        const common = [...there.values()]
          .filter((one) => one.worker === worker)
          .map((one) => naiveCommon(one.prompt, asked));
        expect(inUse.blocksOf(keysOf(asked), worker)).toBe(Math.max(0, ...common));
      }
    }),
  );
});

it('what is given a second time is at the second worker alone', () => {
  const inUse = new InUse();
  inUse.given('a', keysOf([1, 2]), 0);
  inUse.given('a', keysOf([1, 2]), 1);
  expect([0, 1].map((worker) => inUse.blocksOf(keysOf([1, 2, 3]), worker))).toEqual([0, 2]);
});

/** Arrays of steps: of the size asked, clear where a step writes only some, and no new memory for a step that fits. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { StepArrays } from './step-arrays.ts';

const size = fc.integer({ min: 1, max: 300 });

it('each step gets arrays of its size; what draws is clear, whatever the step before has written', () => {
  fc.assert(
    fc.property(fc.array(fc.tuple(size, size, size), { minLength: 1, maxLength: 20 }), (steps) => {
      const arrays = new StepArrays();
      for (const [sequences, tokens, entries] of steps) {
        const step = arrays.take(sequences, tokens, entries);
        const { tokenIds, blockTables, sample, seed, ...perSequence } = step;
        expect([tokenIds.length, blockTables.length, sample.length, seed.length]).toEqual([
          tokens,
          entries,
          sequences,
          sequences,
        ]);
        for (const array of Object.values(perSequence)) expect(array).toHaveLength(sequences);
        expect(sample.every((one) => one === 0)).toBe(true);
        expect(seed.every((one) => one === 0n)).toBe(true);
        for (const array of Object.values(step)) if (array !== seed) (array as Int32Array).fill(9);
        seed.fill(9n);
      }
    }),
  );
});

it('a step that is no larger than one before takes no memory', () => {
  const arrays = new StepArrays();
  const before = arrays.take(256, 256, 256 * 500);
  const { buffer } = before.blockTables;
  for (let step = 0; step < 100; step++) {
    const now = arrays.take(256 - step, 300 - step, 256 * 500 + step * 256);
    expect(now.blockTables.buffer).toBe(buffer);
    expect(now.seed.buffer).toBe(before.seed.buffer);
  }
});

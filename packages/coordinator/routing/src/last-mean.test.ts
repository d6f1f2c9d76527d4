import fc from 'fast-check';
import { expect, it } from 'vitest';
import { LastMean } from './last-mean.ts';

it('is the mean of the last 256, once 16 were seen', () => {
  fc.assert(
    fc.property(fc.array(fc.integer({ min: 0, max: 1_000_000 }), { maxLength: 600 }), (values) => {
      const seen = new LastMean();
      for (const value of values) seen.add(value);
      const last = values.slice(-256);
      const sum = last.reduce((all, value) => all + value, 0);
      expect(seen.mean).toBe(last.length < 16 ? undefined : sum / last.length);
    }),
  );
});

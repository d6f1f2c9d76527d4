import fc from 'fast-check';
import { expect, it } from 'vitest';
import { type Published, ReplayBuffer } from './replay-buffer.ts';

const batch = (seq: number, bytes: number): Published => ({ seq, topic: '', payload: Buffer.alloc(bytes) });

it('keeps the newest batches within its count and its bytes', () => {
  const step = fc.record({ skip: fc.nat(2), bytes: fc.integer({ min: 1, max: 40 }) });
  fc.assert(
    fc.property(fc.nat(6), fc.integer({ min: 1, max: 100 }), fc.array(step), (maxBatches, maxBytes, steps) => {
      const buffer = new ReplayBuffer(maxBatches, maxBytes);
      let oracle: Published[] = [];
      let seq = -1;
      for (const { skip, bytes } of steps) {
        seq += 1 + skip;
        const one = batch(seq, bytes);
        buffer.push(one);
        oracle.push(one);
        const sum = (): number => oracle.reduce((total, { payload }) => total + payload.length, 0);
        while (oracle.length > maxBatches || sum() > maxBytes) oracle = oracle.slice(1);
        expect([buffer.count, buffer.bytes]).toEqual([oracle.length, sum()]);
        for (let from = 0; from <= seq + 1; from++)
          expect(buffer.firstFrom(from)).toBe(oracle.find((kept) => kept.seq >= from));
      }
    }),
  );
});

it('takes batches in order only', () => {
  const buffer = new ReplayBuffer(4, 100);
  buffer.push(batch(3, 1));
  expect(() => buffer.push(batch(3, 1))).toThrow('batch 3 after 3');
});

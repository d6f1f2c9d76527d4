import fc from 'fast-check';
import { expect, it } from 'vitest';
import { FreeQueue } from './free-queue.ts';

const blockCount = 6;
const step = fc.tuple(
  fc.constantFrom('append' as const, 'prepend' as const, 'remove' as const, 'takeFront' as const),
  fc.nat({ max: blockCount - 1 }),
);

it('is an array that can lose any of its items', () => {
  fc.assert(
    fc.property(fc.array(step, { maxLength: 60 }), (steps) => {
      const queue = new FreeQueue(blockCount);
      let array: number[] = [];
      for (const [operation, block] of steps) {
        if (operation === 'takeFront') {
          if (array.length < block) expect(() => queue.takeFront(block)).toThrow('blocks wanted');
          else expect(queue.takeFront(block)).toEqual(array.splice(0, block));
        } else if (array.includes(block) !== (operation === 'remove')) {
          expect(() => queue[operation](block)).toThrow(`block ${block}`);
        } else {
          queue[operation](block);
          if (operation === 'remove') array = array.filter((other) => other !== block);
          else array = operation === 'append' ? [...array, block] : [block, ...array];
        }
        expect(queue.toArray()).toEqual(array);
        expect(queue.count).toBe(array.length);
        queue.checkIntegrity();
      }
    }),
  );
});

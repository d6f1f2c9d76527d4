import fc from 'fast-check';
import { expect, it } from 'vitest';
import { FreeQueue } from './free-queue.ts';

const blockCount = 6;
const step = fc.tuple(
  fc.constantFrom('append' as const, 'prepend' as const, 'remove' as const, 'takeFront' as const, 'restore' as const),
  fc.nat({ max: blockCount - 1 }),
);

it('is an array that can lose any of its items', () => {
  fc.assert(
    fc.property(fc.array(step, { maxLength: 60 }), (steps) => {
      const queue = new FreeQueue(blockCount);
      let array: number[] = [];
      const stamps = new Map<number, number>();
      let time = 0;
      for (const [operation, block] of steps) {
        if (operation === 'takeFront') {
          if (array.length < block) expect(() => queue.takeFront(block)).toThrow('blocks wanted');
          else expect(queue.takeFront(block)).toEqual(array.splice(0, block));
        } else if (array.includes(block) !== (operation === 'remove')) {
          expect(() => queue[operation](block)).toThrow(`block ${block}`);
        } else if (operation === 'restore') {
          queue.restore(block);
          const at = array.findIndex((other) => (stamps.get(other) ?? 0) >= (stamps.get(block) ?? 0));
          array = at < 0 ? [...array, block] : array.toSpliced(at, 0, block);
        } else {
          queue[operation](block);
          if (operation === 'remove') array = array.filter((other) => other !== block);
          else stamps.set(block, operation === 'append' ? ++time : 0);
          if (operation !== 'remove') array = operation === 'append' ? [...array, block] : [block, ...array];
        }
        expect(queue.toArray()).toEqual(array);
        expect(queue.count).toBe(array.length);
        expect(queue.first(2)).toEqual(array.slice(0, 2));
        queue.checkIntegrity();
      }
    }),
  );
});

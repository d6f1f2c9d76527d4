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
          const act = (): void => (operation === 'restore' ? queue.restore([block]) : queue[operation](block));
          expect(act).toThrow(`block ${block}`);
        } else if (operation === 'restore') {
          queue.restore([block]);
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

const manyCount = 40;
const many = Array.from({ length: manyCount }, (_, block) => block);
/** Some stand in the queue, the first of them prepended, and some of these go out and come back, each in any order. */
const outs = fc.record({
  order: fc.shuffledSubarray(many),
  out: fc.shuffledSubarray(many),
  prepended: fc.nat({ max: 3 }),
});

it('takes several back as if each came alone, in any order', () => {
  fc.assert(
    fc.property(outs, ({ order, out, prepended }) => {
      const queues = [new FreeQueue(manyCount), new FreeQueue(manyCount)] as const;
      const back = out.filter((block) => order.includes(block));
      for (const queue of queues) {
        for (const [at, block] of order.entries()) {
          if (at < prepended) queue.prepend(block);
          else queue.append(block);
        }
        for (const block of back) queue.remove(block);
      }
      queues[0].restore(back);
      for (const block of back) queues[1].restore([block]);
      expect(queues[0].toArray()).toEqual(queues[1].toArray());
      if (prepended === 0) expect(queues[0].toArray()).toEqual(order);
      queues[0].checkIntegrity();
    }),
  );
});

it('takes a chain back without a walk for each of its blocks', () => {
  const count = 200_000;
  const chain = Array.from({ length: 4096 }, (_, i) => count / 2 + i);
  const queue = new FreeQueue(count);
  for (let block = 0; block < count; block++) queue.append(block);
  for (const block of chain) queue.remove(block);
  const before = process.cpuUsage();
  queue.restore([...chain].reverse());
  const { user, system } = process.cpuUsage(before);
  expect((user + system) / 1000).toBeLessThan(50);
  expect(queue.toArray()).toEqual(Array.from({ length: count }, (_, block) => block));
});

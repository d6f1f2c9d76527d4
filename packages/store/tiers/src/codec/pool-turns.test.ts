import fc from 'fast-check';
import { expect, it } from 'vitest';
import { PoolTurns } from './pool-turns.ts';

const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** Calls that end when they are told to. */
class Calls {
  readonly begun: number[] = [];
  readonly ends: ((error?: Error) => void)[] = [];
  call = (which: number) => () => {
    this.begun.push(which);
    return new Promise<number>((resolve, reject) => {
      this.ends[which] = (error) => (error ? reject(error) : resolve(which));
    });
  };
}

it('runs so many at once; what is urgent goes before all that waits', async () => {
  const [turns, calls] = [new PoolTurns(2, 10), new Calls()];
  const results = [0, 1, 2, 3, 4, 5].map((which) => turns.run(calls.call(which), which >= 4));
  expect(calls.begun).toEqual([0, 1]);
  expect([turns.running, turns.waiting]).toEqual([2, 4]);
  for (const next of [0, 1, 4, 5, 2, 3]) {
    calls.ends[next]!();
    await turn();
  }
  expect(calls.begun).toEqual([0, 1, 4, 5, 2, 3]);
  expect(await Promise.all(results)).toEqual([0, 1, 2, 3, 4, 5]);
  expect([turns.running, turns.waiting]).toEqual([0, 0]);
});

it('refuses, without a call, when too many wait; urgent ones have room of their own', () => {
  const [turns, calls] = [new PoolTurns(1, 2), new Calls()];
  for (let which = 0; which < 3; which++) expect(turns.run(calls.call(which), false)).toBeDefined();
  expect(turns.run(calls.call(3), false)).toBeUndefined();
  expect(turns.run(calls.call(4), true)).toBeDefined();
  expect(turns.run(calls.call(5), true)).toBeDefined();
  expect(turns.run(calls.call(6), true)).toBeUndefined();
  expect(calls.begun).toEqual([0]);
});

it('goes on after a call that fails, whichever way', async () => {
  const [turns, calls] = [new PoolTurns(1, 10), new Calls()];
  const thrown = turns.run(() => {
    throw new Error('at once');
  }, false);
  const failing = turns.run(calls.call(1), false);
  const last = turns.run(calls.call(2), false);
  await expect(thrown).rejects.toThrow('at once');
  await turn();
  calls.ends[1]!(new Error('later'));
  await expect(failing).rejects.toThrow('later');
  await turn();
  calls.ends[2]!();
  expect(await last).toBe(2);
});

it('whatever the order of things: never more at once, none lost, none begun twice, urgent ones in their order and the others in theirs', async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.array(fc.oneof(fc.boolean(), fc.constant('end' as const)), { maxLength: 80 }),
      async (steps) => {
        const [turns, calls] = [new PoolTurns(2, 8), new Calls()];
        const isUrgent: boolean[] = [];
        const taken: Promise<number>[] = [];
        const ended = new Set<number>();
        const endOne = async (): Promise<void> => {
          const which = calls.begun.find((each) => !ended.has(each));
          if (which === undefined) return;
          ended.add(which);
          calls.ends[which]!();
          await turn();
        };
        for (const step of steps) {
          if (step === 'end') await endOne();
          else {
            const result = turns.run(calls.call(isUrgent.length), step);
            if (result === undefined) continue;
            isUrgent.push(step);
            taken.push(result);
          }
          expect(turns.running).toBeLessThanOrEqual(2);
          expect(turns.running).toBe(calls.begun.length - ended.size);
          expect(turns.waiting).toBe(taken.length - calls.begun.length);
        }
        while (ended.size < taken.length) await endOne();
        expect(await Promise.all(taken)).toEqual(taken.map((_, which) => which));
        for (const urgent of [true, false]) {
          const order = calls.begun.filter((which) => isUrgent[which] === urgent);
          expect(order).toEqual([...order].sort((a, b) => a - b));
        }
      },
    ),
    { numRuns: 100 },
  );
});

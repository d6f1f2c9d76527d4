import { expect, it } from 'vitest';
import { hashText, mix32 } from '../hashing.ts';
import { HashRing } from './hash-ring.ts';

const nameOf = (worker: number): string | undefined => (worker % 3 === 0 ? undefined : `10.0.0.${worker}:8000`);
const order = (ring: HashRing): number[] => Array.from({ length: ring.length }, (_, place) => ring.workerAt(place));

/** All points, sorted at once. */
function naive(workers: readonly number[], named = nameOf): { readonly at: number; readonly worker: number }[] {
  const points = [];
  for (const worker of workers) {
    const name = named(worker);
    const [low, high] = name === undefined ? [worker + 1, 1] : [hashText(name), hashText(` ${name}`)];
    for (let i = 0; i < 256; i++) points.push({ at: mix32(low, high + i), worker });
  }
  return points.sort((a, b) => a.at - b.at || a.worker - b.worker);
}
const numbers = (count: number): number[] => Array.from({ length: count }, (_, worker) => worker);

it('is the same ring whether its workers join one by one or at once, and in whatever order', () => {
  const ring = new HashRing();
  const joined = [20, 0, 3, 2, 1, ...numbers(21)];
  for (const [i, worker] of joined.entries()) {
    ring.add(worker, nameOf(worker));
    if (i < 5) ring.settle();
  }
  ring.settle();
  const points = naive(numbers(21));
  expect(order(ring)).toEqual(points.map(({ worker }) => worker));
  for (const at of [0, 1, points[5]!.at, points[5]!.at + 1, 2 ** 31, points.at(-1)!.at, points.at(-1)!.at + 1]) {
    const place = points.findIndex((point) => point.at >= at);
    expect(ring.find(at)).toBe(place === -1 ? 0 : place);
  }
});

it('is without those that have left, and has those that came in their place, however soon', () => {
  const ring = new HashRing();
  for (const worker of numbers(6)) ring.add(worker, nameOf(worker));
  ring.settle();
  for (const worker of [1, 2, 3, 9]) ring.drop(worker);
  ring.add(2, 'other'); // before it was settled
  ring.add(3, 'other too');
  ring.drop(3);
  expect(numbers(7).map((worker) => ring.has(worker))).toEqual([true, false, true, false, true, true, false]);
  expect(ring.length).toBe(6 * 256);
  ring.settle();
  const points = naive([0, 2, 4, 5], (worker) => (worker === 2 ? 'other' : nameOf(worker)));
  expect(order(ring)).toEqual(points.map(({ worker }) => worker));
});

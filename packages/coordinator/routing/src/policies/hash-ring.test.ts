import { expect, it } from 'vitest';
import { mix32 } from '../hashing.ts';
import { HashRing } from './hash-ring.ts';

const order = (ring: HashRing): number[] => Array.from({ length: ring.length }, (_, place) => ring.workerAt(place));

/** All points, sorted at once. */
function naive(workers: number): { readonly at: number; readonly worker: number }[] {
  const points = [];
  for (let worker = 0; worker < workers; worker++)
    for (let i = 0; i < 256; i++) points.push({ at: mix32(worker + 1, i + 1), worker });
  return points.sort((a, b) => a.at - b.at);
}

it('is the same ring whether its workers join one by one or at once', () => {
  const ring = new HashRing();
  for (const count of [1, 2, 3, 20, 21]) ring.grow(count);
  const points = naive(21);
  expect(order(ring)).toEqual(points.map(({ worker }) => worker));
  for (const at of [0, 1, points[5]!.at, points[5]!.at + 1, 2 ** 31, points.at(-1)!.at, points.at(-1)!.at + 1]) {
    const place = points.findIndex((point) => point.at >= at);
    expect(ring.find(at)).toBe(place === -1 ? 0 : place);
  }
  ring.grow(3);
  expect(ring.length).toBe(21 * 256);
});

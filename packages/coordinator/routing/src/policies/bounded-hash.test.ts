/** What a worker that joins costs, by the numbers that are sorted: no clock has to be believed. */
import { expect, it, vi } from 'vitest';
import { policies, type RoutedRequest, type WorkerState } from '../index.ts';

const request: RoutedRequest = { tokens: 64, maxTokens: 1, blockTokens: 16, keys: new Int32Array(8), session: '' };
const pointsPerWorker = 256;

it('sorts no points anew when a worker joins a thousand others', () => {
  const sorts = vi.spyOn(Object.getPrototypeOf(Float64Array.prototype) as Float64Array, 'sort');
  const policy = policies['bounded-hash']();
  const idle = { waiting: 0, running: 0 } as WorkerState;
  const workers = new Array<WorkerState>(1_000).fill(idle);
  /** How many points are sorted for a choice. */
  const sorted = (): number => {
    sorts.mockClear();
    policy.choose(request, workers, 0, () => 0.5);
    return (sorts.mock.contexts as Float64Array[]).reduce((sum, { length }) => sum + length, 0);
  };
  try {
    expect(sorted()).toBe(1_000 * pointsPerWorker);
    for (let i = 0; i < 10; i++) {
      workers.push(idle);
      expect(sorted()).toBe(pointsPerWorker);
    }
    expect(sorted()).toBe(0);
  } finally {
    sorts.mockRestore();
  }
});

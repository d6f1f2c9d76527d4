import { expect, it } from 'vitest';
import { simulateFeed } from '../testing/feed-simulation.ts';

it.each([1, 2, 3])(
  'minutes of a cluster with all that can go wrong: what is credited is what is held (seed %i)',
  async (seed) => {
    const result = await simulateFeed({ seed, minutes: 3 });
    expect(result.failure).toBeUndefined();
    expect(result).toMatchObject({ quietPoints: 3, droppedBlocks: 0 });
    for (const name of ['lost', 'repeated', 'late', 'snapshots'] as const) expect(result[name]).toBeGreaterThan(10);
    // What was told of while nobody heard, and after a block that is gone, has no name until it is told again.
    expect(result.renamedHeld).toBeGreaterThan(200);
    expect(result.renamedCredited / result.renamedHeld).toBeGreaterThan(0.95);
  },
);

it('a planted fault is found: one who does not forget what is void', async () => {
  const { failure } = await simulateFeed({ seed: 1, minutes: 2, isDeaf: true });
  expect(failure).toMatch(/is credited with a block .*it dropped/);
});

it('in an index that is too small, less is credited than is held, and never more', async () => {
  const result = await simulateFeed({ seed: 1, minutes: 2, maxBytes: 512 * 1024, isTight: true });
  expect(result.failure).toBeUndefined();
  expect(result.droppedBlocks).toBeGreaterThan(0);
});

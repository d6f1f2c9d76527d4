/** The limits that go with others: who changes one of a pair need not know of the other. */
import { expect, it } from 'vitest';
import { limitsOf } from './limits.ts';
import { heapMiBFor } from './text-pool.ts';

const MiB = 1 << 20;

it.each([
  [64 << 10, 16],
  [16 * MiB, 16],
  [17 * MiB, 15],
  [32 * MiB, 8],
  [128 * MiB, 2],
  [256 * MiB, 1],
  [1_024 * MiB, 1],
])(
  'of bodies of %i bytes so many arrive at once that all together are 256 MiB at most, but one: %i',
  (bodyBytes, places) => {
    expect(limitsOf({ bodyBytes })).toEqual({ ...limitsOf(), bodyBytes, largeBodies: places });
  },
);

it.each([
  [1_000, 60_000],
  [20_000, 60_000],
  [20_001, 60_002],
  [600_000, 1_220_000],
])(
  'a large body that waits and arrives for %i ms each is not cut before by the bound of all requests: %i ms',
  (largeBodyMs, receiveMs) => {
    expect(limitsOf({ largeBodyMs })).toEqual({ ...limitsOf(), largeBodyMs, receiveMs });
  },
);

it('what is given counts', () => {
  const given = { bodyBytes: 32 * MiB, largeBodies: 3, largeBodyMs: 90_000, receiveMs: 5_000 };
  expect(limitsOf(given)).toEqual({ ...limitsOf(), ...given });
});

it.each([
  [16, 1_024],
  [42, 1_024],
  [43, 1_032],
  [128, 3_072],
])('who reads bodies of %i MiB has a heap of %i MiB', (bodyMiB, heapMiB) => {
  expect(heapMiBFor(bodyMiB * MiB)).toBe(heapMiB);
});

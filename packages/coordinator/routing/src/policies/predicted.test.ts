import { maxMedia } from '@kvtier/kv-index';
import * as fc from 'fast-check';
import { expect, it } from 'vitest';
import { policies, type RoutedRequest, type WorkerState } from '../index.ts';
import { eligible, leastBy } from '../policy.ts';
import { costOf } from './predicted.ts';

const state = fc.record({
  waiting: fc.nat(4),
  running: fc.nat(8),
  tokensAhead: fc.nat(2_000),
  stepTokens: fc.option(fc.nat(2_500), { nil: undefined }),
  stepForS: fc.option(fc.double({ min: 0, max: 0.1, noNaN: true }), { nil: undefined }),
  usedBlocks: fc.nat(100),
  totalBlocks: fc.constantFrom(0, 100),
  waitingBlocks: fc.nat(40),
  freedBlocksPerS: fc.constantFrom(0, 10),
  maxStepTokens: fc.constantFrom(undefined, 128),
  maxRunning: fc.constantFrom(undefined, 4),
  loadAheadS: fc.constantFrom(0, 0.3),
  prefillTokensPerS: fc.constantFrom(0, 500, 1_000),
  stepS: fc.constantFrom(0, 0.01),
  stepPerRequestS: fc.constantFrom(0, 0.001),
  loadBlocksPerS: fc.constantFrom([], [0, 100, 50, 200]),
  held: fc.nat(20),
  medium: fc.nat(2),
  remoteBlocks: fc.nat(20),
  remoteMedium: fc.constant(3),
});

it('chooses a worker of least cost, and of several the one that chance says, though it skips those that cannot be', () => {
  fc.assert(
    fc.property(
      fc.array(fc.option(state, { freq: 6 }), { minLength: 1, maxLength: 24 }),
      fc.integer({ min: 1, max: 400 }),
      fc.integer(),
      (states, tokens, seed) => {
        const workers = states.map((one): WorkerState | undefined => {
          if (one === null) return undefined;
          const byMedium = new Int32Array(maxMedia);
          byMedium[one.medium] = one.held;
          return { ...one, match: { blocks: one.held, byMedium } };
        });
        const numbers = eligible(workers);
        fc.pre(numbers.length > 0);
        const request: RoutedRequest = { tokens, maxTokens: 10, blockTokens: 16, keys: new Int32Array(), session: '' };
        const chance = (): (() => number) => {
          let draws = seed;
          return () => {
            draws = (Math.imul(draws, 1_664_525) + 1_013_904_223) | 0;
            return (draws >>> 0) / 2 ** 32;
          };
        };
        const waiting = numbers.reduce((sum, number) => sum + workers[number]!.waiting, 0);
        const weight = 1 + waiting / numbers.length / 2;
        const least = leastBy(numbers, chance(), (number) => costOf(request, workers[number]!, 0, 0, weight));
        expect(policies.predicted().choose(request, workers, 0, chance())).toBe(least);
      },
    ),
    { numRuns: 2_000 },
  );
});

import { execFile } from 'node:child_process';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { KvIndex, type Match, maxMedia } from '@kvtier/kv-index';
import * as fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { mix32 } from './hashing.ts';
import { type PolicyName, policies, type RoutedRequest, type WorkerState } from './index.ts';
import { fingerprint } from './policies/sim-hash.ts';

const names = Object.keys(policies) as PolicyName[];
const match = (blocks: number, medium = 0): Match => {
  const byMedium = new Int32Array(maxMedia);
  byMedium[medium] = blocks;
  return { blocks, byMedium };
};
const worker = (given: Partial<WorkerState> = {}): WorkerState => ({
  waiting: 0,
  running: 0,
  tokensAhead: 0,
  usedBlocks: 0,
  totalBlocks: 1000,
  waitingBlocks: 0,
  freedBlocksPerS: 10,
  loadAheadS: 0,
  prefillTokensPerS: 1000,
  stepS: 0.01,
  stepPerRequestS: 0.001,
  loadBlocksPerS: [0, 1000, 100, 50],
  match: match(0),
  remoteBlocks: 0,
  remoteMedium: 3,
  ...given,
});
const request = (first = 1, blocks = 4): RoutedRequest => ({
  tokens: blocks * 16 + 3,
  maxTokens: 10,
  blockTokens: 16,
  keys: Int32Array.from({ length: 2 * blocks }, (_, i) => mix32(first * 1000 + i, i) | 0),
  session: '',
});
const half = (): number => 0.5;

describe.each(names)('the policy "%s"', (name) => {
  it('chooses a worker that is eligible, the same one for the same past, and goes on when workers come and go', () => {
    const step = fc.record({
      first: fc.nat(5),
      blocks: fc.integer({ min: 0, max: 20 }),
      session: fc.constantFrom('', 'a', 'b'),
      loads: fc.array(
        fc.record({ waiting: fc.nat(80), running: fc.nat(80), tokensAhead: fc.nat(1e6), used: fc.nat(1000) }),
        { minLength: 1, maxLength: 6 },
      ),
      out: fc.nat(5),
      gone: fc.boolean(),
    });
    fc.assert(
      fc.property(fc.array(step, { minLength: 1, maxLength: 20 }), fc.integer(), (steps, seed) => {
        const live = (): number[] => {
          const policy = policies[name]();
          let state = seed >>> 0;
          const random = (): number => {
            state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
            return state / 2 ** 32;
          };
          return steps.map(({ first, blocks, session, loads, out, gone }, i) => {
            const workers = loads.map(({ used, ...load }, n) =>
              n === out % loads.length && loads.length > 1 ? undefined : worker({ ...load, usedBlocks: used }),
            );
            const one = { ...request(first, blocks), session };
            const chosen = policy.choose(one, workers, i * 1000, random);
            expect(workers[chosen], `${name} chose ${chosen}`).not.toBe(undefined);
            policy.sent?.(one, chosen, i * 1000);
            if (gone) policy.left?.(out);
            return chosen;
          });
        };
        expect(live()).toEqual(live());
      }),
      { numRuns: 30 },
    );
  });
});

describe('policies', () => {
  const choose = (name: PolicyName, workers: WorkerState[], one = request(), random = half): number =>
    policies[name]().choose(one, workers, 0, random);

  it('round robin takes one after another and leaves out who is not eligible', () => {
    const policy = policies['round-robin']();
    const workers = [worker(), undefined, worker()];
    expect([1, 2, 3].map(() => policy.choose(request(), workers, 0, half))).toEqual([0, 2, 0]);
  });

  it('least loaded counts those that wait and those that run', () => {
    expect(
      choose('least-loaded', [worker({ waiting: 3 }), worker({ running: 2 }), worker({ waiting: 1, running: 2 })]),
    ).toBe(1);
  });

  it('power of two takes the less loaded of two', () => {
    const draws = [0.99, 0.4]; // the third worker, and the second one after it
    expect(
      choose(
        'power-of-two',
        [worker({ waiting: 5 }), worker({ waiting: 9 }), worker({ waiting: 7 })],
        request(),
        () => draws.shift()!,
      ),
    ).toBe(0);
  });

  it('bounded hashing keeps prompts with one beginning together until their worker is above 1.25 of the mean', () => {
    const policy = policies['bounded-hash']();
    const idle = [worker(), worker(), worker(), worker()];
    const home = policy.choose(request(7), idle, 0, half);
    expect(policy.choose(request(7, 9), idle, 0, half)).toBe(home);
    const busy = idle.map((_, i) => (i === home ? worker({ running: 10 }) : worker({ running: 6 })));
    expect(policy.choose(request(7), busy, 0, half)).not.toBe(home);
  });

  it('bounded hashing keeps a prompt at home while nobody has anything, and where nobody is within the bound', () => {
    const policy = policies['bounded-hash']();
    const prompts = Array.from({ length: 100 }, (_, i) => request(i + 1));
    const homes = (running: readonly number[]): number[] =>
      prompts.map((prompt) =>
        policy.choose(
          prompt,
          running.map((count) => worker({ running: count })),
          0,
          half,
        ),
      );
    const idle = homes([0, 0, 0, 0, 0, 0, 0, 0]);
    expect(new Set(idle).size).toBe(8);
    expect(homes([9, 9, 9, 9, 9, 9, 9, 9])).toEqual(idle);
    // One request at all, and 2 ÷ 8 × 1.25 is below one: nobody is within the bound.
    expect(homes([0, 0, 0, 1, 0, 0, 0, 0])).toEqual(idle);
  });

  it('SimHash sends prompts that share most blocks to one worker', () => {
    const policy = policies['sim-hash']();
    const workers = [worker(), worker({ running: 1 })];
    policy.sent!(request(3, 40), 1, 0);
    expect(policy.choose(request(3, 41), workers, 0, half)).toBe(1);
    expect(policy.choose(request(4, 40), workers, 0, half)).toBe(0);
    expect(fingerprint(Int32Array.of(1, 0, 3, -1, 1, 0))).toEqual([1, 0]);
  });

  it('the hash trie takes the longest match, whatever the load', () => {
    const policy = policies['hash-trie']();
    policy.sent!(request(3, 5), 0, 0);
    policy.sent!(request(3, 9), 1, 0);
    expect(policy.choose(request(3, 9), [worker(), worker({ waiting: 500 })], 0, half)).toBe(1);
  });

  it('the balanced tree leaves a match when the load is too uneven', () => {
    const policy = policies['balanced-tree']();
    policy.sent!(request(3, 9), 1, 0);
    expect(policy.choose(request(3, 9), [worker(), worker({ waiting: 64 })], 0, half)).toBe(1);
    expect(policy.choose(request(3, 9), [worker(), worker({ waiting: 65 })], 0, half)).toBe(0);
  });

  it('the load band takes a match within one deviation of the mean, and none when loads differ by more than 8', () => {
    const policy = policies['load-band']();
    policy.sent!(request(3, 9), 1, 0);
    expect(policy.choose(request(3, 9), [worker({ waiting: 2 }), worker({ waiting: 4 })], 0, half)).toBe(1);
    expect(policy.choose(request(3, 9), [worker({ waiting: 2 }), worker({ waiting: 11 })], 0, half)).toBe(0);
  });

  it('scores weigh prefix 3, pool 2 and queue 2', () => {
    const policy = policies.scored();
    policy.sent!(request(3, 4), 0, 0);
    expect(policy.choose(request(3, 4), [worker({ usedBlocks: 999 }), worker()], 0, half)).toBe(0); // 3 + 0 + 2 against 0 + 2 + 2
    expect(policy.choose(request(3, 4), [worker({ usedBlocks: 999, waiting: 1 }), worker()], 0, half)).toBe(1);
  });

  it('scores weigh prefix and queue where pods do not tell how many blocks they have', () => {
    const untold = (waiting: number): WorkerState => worker({ totalBlocks: 0, waiting });
    const policy = policies.scored();
    expect(policy.choose(request(3, 4), [untold(5), untold(0)], 0, half)).toBe(1);
    policy.sent!(request(3, 4), 1, 0);
    expect(policy.choose(request(3, 4), [untold(0), untold(0)], 0, half)).toBe(1);
    expect(policy.choose(request(9, 4), [worker({ usedBlocks: 500 }), untold(0)], 0, half)).toBe(1);
  });

  it('overlap cost credits media by their weight', () => {
    const workers = [
      worker({ match: match(4, 1), usedBlocks: 2 }),
      worker({ match: match(2, 0) }),
      worker({ match: match(4, 2) }),
    ];
    expect(choose('overlap-cost', workers)).toBe(1); // 1 + 2, 2 + 0, 3 + 0
  });

  it('sticky stays until another worker is 18 s sooner', () => {
    const holder = (tokensAhead: number): WorkerState => worker({ match: match(4), tokensAhead });
    expect(choose('sticky', [worker(), holder(18_000)])).toBe(1);
    expect(choose('sticky', [worker(), holder(18_001)])).toBe(0);
  });

  it('predicted weighs waiting, bringing and computing in seconds', () => {
    // 67 tokens: 67 ms of computing; 64 of them held: 3 ms.
    expect(choose('predicted', [worker(), worker({ match: match(4), tokensAhead: 60 })])).toBe(1);
    expect(choose('predicted', [worker(), worker({ match: match(4), tokensAhead: 70 })])).toBe(0);
    // From elsewhere at 50 blocks a second: 80 ms, slower than computing; at 1,000: 4 ms.
    expect(choose('predicted', [worker({ remoteBlocks: 4, tokensAhead: 10 }), worker()])).toBe(1);
    expect(choose('predicted', [worker({ remoteBlocks: 4, remoteMedium: 1, tokensAhead: 10 }), worker()])).toBe(0);
    // No room for half a second.
    expect(
      choose('predicted', [
        worker({ match: match(4), running: 1, usedBlocks: 1000, freedBlocksPerS: 2 }),
        worker({ tokensAhead: 60 }),
      ]),
    ).toBe(1);
  });

  it('brings in while others compute, and counts those that run in every step', () => {
    // 64 of 67 tokens from elsewhere in 80 ms, where 90 ms are ahead; on the idle worker they are computed in 67 ms.
    const remote = { remoteBlocks: 4, remoteMedium: 1, loadBlocksPerS: [0, 50] };
    const slow = { prefillTokensPerS: 400 };
    expect(choose('predicted', [worker({ ...slow, ...remote, tokensAhead: 36 }), worker(slow)])).toBe(0);
    expect(choose('predicted', [worker({ running: 20 }), worker({ running: 10 })])).toBe(1);
  });

  it('counts those that run in as many steps as the worker takes for a prompt', () => {
    const long = request(1, 128); // 2,051 tokens
    const [small, large] = [512, 2_048].map((maxStepTokens) => worker({ running: 20, maxStepTokens }));
    expect(policies.predicted().choose(long, [small, large], 0, half)).toBe(1);
    // 3 steps more, 20 ms each.
    for (const [ms, chosen] of [
      [59, 1],
      [61, 0],
    ] as const)
      expect(policies.predicted().choose(long, [small, { ...large!, tokensAhead: ms }], 0, half)).toBe(chosen);
  });

  it('knows of a step that computes prompts how much of it is left', () => {
    // Two workers with 60 ms of work, all of it in the step that runs; one of them has done most of it.
    const at = (stepForS: number): WorkerState => worker({ waiting: 1, tokensAhead: 60, stepTokens: 60, stepForS });
    expect(choose('predicted', [at(0.01), at(0.05)])).toBe(1);
    expect(choose('predicted', [at(0.05), at(0.01)])).toBe(0);
    // 5 ms left there are sooner than 20 ms that no step computes yet; one that takes longer than it should ends at any time.
    const queued = worker({ waiting: 1, tokensAhead: 20 });
    expect([0.03, 0.055, 0.1].map((stepForS) => choose('predicted', [queued, at(stepForS)]))).toEqual([0, 1, 1]);
  });

  it('goes where the step ends first, of steps that only give tokens, too; of one that nobody told, half is left', () => {
    // Steps of 12 ms, begun so many ms ago, or some whole steps before that.
    const at = (forMs?: number): WorkerState => worker({ running: 2, stepForS: forMs && forMs / 1000 });
    expect(choose('predicted', [at(3), at(9)])).toBe(1);
    expect(choose('predicted', [at(9), at(12 + 10)])).toBe(1);
    expect(choose('predicted', [at(), at(5)])).toBe(0);
    expect(choose('predicted', [at(), at(7)])).toBe(1);
    // One that has not measured how long its steps are is weighed by what it has to do.
    const unmeasured = (tokensAhead: number): WorkerState =>
      worker({ running: 2, stepForS: 0.003, stepS: 0, stepPerRequestS: 0, tokensAhead });
    expect(choose('predicted', [unmeasured(500), unmeasured(0)])).toBe(1);
  });

  it('gives a new worker work, and has it brought what others hold', () => {
    const holder = (tokensAhead: number): WorkerState => worker({ match: match(4), tokensAhead });
    const fresh = worker({ remoteBlocks: 4, remoteMedium: 1 });
    expect(choose('predicted', [holder(0), fresh])).toBe(0);
    expect(choose('predicted', [holder(30), fresh])).toBe(1);
  });

  it('sees no room where nothing was freed yet, and room on an idle worker whatever it says', () => {
    const packed = { match: match(4), usedBlocks: 1000, waitingBlocks: 9, freedBlocksPerS: 0 };
    expect(choose('predicted', [worker({ ...packed, running: 1 }), worker()])).toBe(1);
    expect(choose('predicted', [worker(packed), worker()])).toBe(0);
  });

  it('saves work where many wait', () => {
    const workers = (waiting: number): WorkerState[] => [
      worker({ waiting }),
      worker({ match: match(4), tokensAhead: 200, waiting }),
    ];
    expect(choose('predicted', workers(0))).toBe(0);
    expect(choose('predicted', workers(8))).toBe(1);
  });

  it('learn from an index of what was sent, within a bound', () => {
    expect(() => new KvIndex({ maxBytes: 1 })).toThrow('1 bytes are too few');
  });

  it('leaves next to nothing to be collected after a decision among many workers', async () => {
    const main = join(import.meta.dirname, 'testing/decision-bytes-main.ts');
    const flags = ['--no-concurrent-recompilation', '--import', import.meta.resolve('tsx')];
    const { stdout } = await promisify(execFile)(process.execPath, [...flags, main, '64'], { timeout: 100_000 });
    expect(Number(stdout)).toBeGreaterThan(0);
    expect(Number(stdout)).toBeLessThan(64 * 128);
  }, 120_000); // it loads all of it in a process of its own
});

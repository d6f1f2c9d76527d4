/**
 * Models with sliding windows in a simulated world: random requests, pools, chunks and losses, in each attention group by
 * itself. Answers are the naive model's, the tier holds what is right, no load names a block outside of the window, all
 * blocks come back, and nothing hangs.
 */
import { SequenceHashes } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { groupSlotsOf } from './testing/content-executor.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import { EngineWorld } from './testing/world.ts';

const blockTokens = 4;

const request = fc.record({
  which: fc.nat({ max: 2 }),
  promptTokens: fc.integer({ min: 1, max: 40 }),
  maxTokens: fc.integer({ min: 1, max: 14 }),
  pause: fc.nat({ max: 40 }),
  abortAfter: fc.option(fc.nat({ max: 25 }), { freq: 6 }),
});

const chance = fc.oneof(
  { weight: 3, arbitrary: fc.constant(0) },
  { weight: 2, arbitrary: fc.integer({ max: 60, min: 5 }) },
);

const scenario = fc.record({
  seed: fc.integer(),
  windows: fc.constantFrom<number[]>([0, 9], [0, 8, 8], [0, 1], [6], [0, 5, 14]),
  spareBlocks: fc.nat({ max: 40 }),
  maxStepTokens: fc.integer({ min: 1, max: 24 }),
  maxSequences: fc.integer({ min: 1, max: 5 }),
  exportShare: fc.constantFrom(0.05, 0.5, 1),
  lyingMatch: chance,
  shortLoad: chance,
  lostBlock: chance.map((percent) => percent / 4),
  lateLoad: chance,
  refuseStore: chance,
  lostStore: chance,
  renews: chance,
  stepFailure: chance.map((percent) => percent / 5),
  /** A draw is no token. */
  spoiled: chance.map((percent) => percent / 3),
  requests: fc.array(request, { minLength: 1, maxLength: 10 }),
});

it('answers right, holds right, loads nothing outside of the window, frees all, and never hangs', async () => {
  await fc.assert(
    fc.asyncProperty(scenario, async (one) => {
      const dice = new EngineWorld(one.seed + 1).choose;
      const happens = (percent: number) => (): boolean => dice(100) < percent;
      // The longest request fits: 54 tokens where all are seen, else a window, a step and two blocks more.
      const poolBlocks =
        one.spareBlocks +
        one.windows.reduce<number>(
          (sum, window) =>
            sum + (window === 0 ? 14 : Math.min(14, Math.ceil((window - 1 + one.maxStepTokens) / blockTokens) + 1)),
          0,
        );
      const rig = new SchedulerRig({
        seed: one.seed,
        blockTokens,
        blockCount: poolBlocks + 1,
        windows: one.windows,
        limits: {
          maxStepTokens: one.maxStepTokens,
          maxSequences: one.maxSequences,
          exportShare: one.exportShare,
          matchDeadlineMs: 1,
          loadDeadlineMs: 2,
        },
        faults: {
          lyingMatch: happens(one.lyingMatch),
          shorten: (blocks) => (happens(one.shortLoad)() ? dice(blocks + 1) : blocks),
          lostBlock: happens(one.lostBlock),
          lateLoad: happens(one.lateLoad),
          refuseStore: happens(one.refuseStore),
          lostStore: happens(one.lostStore),
          renews: happens(one.renews),
        },
        stepFailure: () => (happens(one.stepFailure)() ? new Error('a fault') : undefined),
        spoilsDraw: happens(one.spoiled),
      });
      expect(rig.engine.maxTotalTokens).toBeGreaterThanOrEqual(54);

      const aborts: { id: string; left: number }[] = [];
      const advance = async (): Promise<void> => {
        if (!(await rig.world.advance())) for (const arrive of rig.connector.late.splice(0)) rig.world.later(arrive);
        for (const abort of aborts) if (abort.left-- === 0) rig.engine.abort(abort.id);
        rig.engine.checkIntegrity();
        expect(rig.defects).toEqual([]);
      };
      for (const [i, { which, promptTokens, maxTokens, pause, abortAfter }] of one.requests.entries()) {
        rig.submit(`r${i}`, prompt(which, promptTokens), { maxTokens });
        if (abortAfter !== null) aborts.push({ id: `r${i}`, left: abortAfter });
        for (let n = 0; n < pause; n++) await advance();
      }
      for (let n = 0; !rig.allEnded(); n++) {
        if (n > 10_000) throw new Error('hang: not all requests end');
        await advance();
      }

      const sequences = one.requests.map(({ which, promptTokens, maxTokens }, i) => {
        const expected = naiveAnswer(prompt(which, promptTokens), maxTokens, [], one.windows);
        const { finishReason, error } = rig.last(`r${i}`);
        if (error) expect(error.message).toMatch(/^a fault$|no finite numbers/);
        else if (finishReason !== 'abort') expect(rig.tokens(`r${i}`)).toEqual(expected);
        expect(expected.slice(0, rig.tokens(`r${i}`).length)).toEqual(rig.tokens(`r${i}`));
        return [...prompt(which, promptTokens), ...expected];
      });

      await rig.drain();
      expect(rig.engine.stats()).toMatchObject({ waiting: 0, running: 0, loading: 0, exportBlocks: 0 });
      expect(rig.engine.stats().freeBlocks).toBe(poolBlocks);
      expect(rig.connector.outsideBlocks).toBe(0);
      for (const tokens of sequences) {
        const hashes = new SequenceHashes(rig.hasher, {});
        hashes.append(Uint32Array.from(tokens));
        for (const [group, slots] of groupSlotsOf(tokens, one.windows).entries()) {
          for (let block = 0; block < hashes.blockCount; block++) {
            const held = rig.connector.tier.get(`${group === 0 ? '' : `${group}:`}${hashes.keyAt(block)}`);
            if (held) expect(held).toEqual(slots.slice(block * blockTokens, (block + 1) * blockTokens));
          }
        }
      }
      let closed = false;
      rig.engine.close().then(() => {
        closed = true;
      }, expect.unreachable);
      await rig.world.until(() => closed);
    }),
    { numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 100) },
  );
}, 600_000);

/**
 * Two engines over one tier, one of which computes prompts for the other: random prompts, pools, faults, aborts on either side and
 * words of a coordinator that changes its mind. Answers are those of the model alone, whatever came; everything that the tier holds
 * is right; each wait ends and is told once; all blocks come back on both sides; nothing hangs.
 */
import { SequenceHashes } from '@kvtier/identity';
import { prefixCacheKinds } from '@kvtier/prefix-cache';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { groupSlotsOf } from './testing/content-executor.ts';
import type { Faults, SharedTier } from './testing/faulty-connector.ts';
import { naiveAnswer, prompt, SchedulerRig } from './testing/rig.ts';
import { EngineWorld } from './testing/world.ts';

const blockTokens = 4;

/** Percent of the prompt's whole blocks. */
const share = fc.integer({ min: 1, max: 100 });
const events = fc.option(fc.nat({ max: 60 }), { freq: 3 });

const request = fc.record({
  which: fc.nat({ max: 3 }),
  promptTokens: fc.integer({ min: 1, max: 40 }),
  maxTokens: fc.integer({ min: 1, max: 12 }),
  /** null: the decode side alone. */
  handOff: fc.option(
    fc.record({
      asked: share,
      prefilled: fc.option(share, { freq: 6 }),
      /** Events after which the wait is changed, and to what: 0 calls it off. */
      changeAfter: events,
      changeTo: fc.constantFrom(0, 0, 20, 60, 100),
      abortPrefillAfter: events,
      isDecodeFirst: fc.boolean(),
      /** The prefill side gives the first token. */
      draws: fc.boolean(),
      /** Events after which the decode side is told the first token, whoever has drawn it. */
      tellAfter: events,
    }),
    { freq: 6 },
  ),
  pause: fc.nat({ max: 30 }),
  abortAfter: events,
});

const chance = fc.oneof(
  { weight: 3, arbitrary: fc.constant(0) },
  { weight: 2, arbitrary: fc.integer({ max: 80, min: 5 }) },
);

const side = fc.record({
  spareBlocks: fc.nat({ max: 30 }),
  maxStepTokens: fc.integer({ min: 1, max: 24 }),
  maxSequences: fc.integer({ min: 1, max: 5 }),
  exportShare: fc.constantFrom(0.05, 0.5, 1),
  prefixCache: fc.constantFrom(...prefixCacheKinds),
  writeDownAheadBlocks: fc.constantFrom(undefined, undefined, 2),
  importsByLayer: fc.boolean(),
  shortLoad: chance,
  lateLoad: chance,
  refuseStore: chance,
  busyStore: chance,
  lostStore: chance,
  stepFailure: chance.map((percent) => percent / 8),
  /** A draw is no token. */
  spoiled: chance.map((percent) => percent / 5),
  /** Events after which the cache node goes, or comes back. */
  detachAfter: fc.option(fc.nat({ max: 200 }), { freq: 2 }),
});

const scenario = fc.record({
  seed: fc.integer(),
  windows: fc.constantFrom<number[] | undefined>(undefined, undefined, undefined, [0, 9], [0, 5, 14], [6]),
  lostBlock: chance.map((percent) => percent / 4),
  prefill: side,
  decode: side,
  requests: fc.array(request, { minLength: 1, maxLength: 8 }),
});

type Scenario = typeof scenario extends fc.Arbitrary<infer T> ? T : never;
const quiet: Scenario['prefill'] = {
  exportShare: 1,
  ...{ spareBlocks: 2, maxStepTokens: 3, maxSequences: 2, prefixCache: 'blocks' },
  ...{
    writeDownAheadBlocks: undefined,
    importsByLayer: false,
    shortLoad: 0,
    lateLoad: 0,
    refuseStore: 0,
    busyStore: 0,
    lostStore: 0,
  },
  ...{ stepFailure: 0, spoiled: 0, detachAfter: null },
};
const asks = (
  which: number,
  promptTokens: number,
  prefilled: number | null,
  part: { asked?: number; changeAfter?: number } = {},
): Scenario['requests'][number] => ({
  ...{ which, promptTokens, maxTokens: 1, pause: 0, abortAfter: null },
  handOff:
    prefilled === null
      ? null
      : {
          ...{ asked: 1, prefilled, changeAfter: null, changeTo: 0, abortPrefillAfter: null, isDecodeFirst: false },
          draws: false,
          tellAfter: null,
          ...part,
        },
});
/** Loads that nobody waits for hold the room that a running request lacks: it computed one chunk again and again. */
const lateLoads: Scenario = {
  ...{ seed: -882846500, windows: [0, 5, 14], lostBlock: 1.25 },
  prefill: { ...quiet, spareBlocks: 0, maxStepTokens: 1, maxSequences: 1, refuseStore: 5 },
  decode: { ...quiet, exportShare: 0.05, shortLoad: 14, lateLoad: 11, detachAfter: 0 },
  requests: [
    { ...asks(0, 32, 1, { asked: 38 }), abortAfter: 16 },
    { ...asks(0, 1, null), maxTokens: 9, pause: 17 },
    asks(1, 5, 1),
    asks(0, 5, 1),
    asks(0, 17, 26, { changeAfter: 0 }),
  ],
};

it('answers right, holds right, ends every wait, frees all on both sides, and never hangs', async () => {
  await fc.assert(
    fc.asyncProperty(scenario, async (one) => {
      const world = new EngineWorld(one.seed);
      const dice = new EngineWorld(one.seed + 1).choose;
      const happens = (percent: number) => (): boolean => dice(100) < percent;
      const tier: SharedTier = { blocks: new Map(), listeners: new Set() };
      const { windows } = one;
      const rigOf = (settings: typeof one.decode): SchedulerRig => {
        const { maxStepTokens, maxSequences, exportShare, importsByLayer } = settings;
        const faults: Faults = {
          shorten: (blocks) => (happens(settings.shortLoad)() ? dice(blocks + 1) : blocks),
          lateLoad: happens(settings.lateLoad),
          refuseStore: happens(settings.refuseStore),
          busyStore: happens(settings.busyStore),
          ...(settings.lostStore > 0 && { lostStore: happens(settings.lostStore) }),
          lostBlock: happens(one.lostBlock),
        };
        const perGroup = (window: number): number =>
          window === 0 ? 14 : Math.min(14, Math.ceil((window - 1 + maxStepTokens) / blockTokens) + 1);
        const poolBlocks = settings.spareBlocks + (windows ?? [0]).reduce((sum, window) => sum + perGroup(window), 0);
        return new SchedulerRig({
          ...{ world, tier, faults, blockTokens, blockCount: poolBlocks + 1 },
          limits: { maxStepTokens, maxSequences, exportShare, matchDeadlineMs: 1, loadDeadlineMs: 2 },
          ...(windows
            ? { windows }
            : {
                importsByLayer,
                prefixCache: settings.prefixCache,
                ...(settings.prefixCache === 'blocks' && { writeDownAheadBlocks: settings.writeDownAheadBlocks }),
              }),
          stepFailure: () => (happens(settings.stepFailure)() ? new Error('a fault') : undefined),
          spoilsDraw: happens(settings.spoiled),
        });
      };
      const [p, d] = [rigOf(one.prefill), rigOf(one.decode)];
      const sides = [
        { rig: p, settings: one.prefill },
        { rig: d, settings: one.decode },
      ];

      const due: { left: number; call: () => void }[] = [];
      const after = (left: number | null, call: () => void): void => {
        if (left !== null) due.push({ left, call });
      };
      for (const { rig, settings } of sides)
        after(settings.detachAfter, () => {
          rig.connector.attached = false;
          after(15, () => {
            rig.connector.attached = true;
            rig.engine.wake();
          });
        });
      const advance = async (): Promise<void> => {
        if (!(await world.advance()))
          for (const { rig } of sides) for (const arrive of rig.connector.late.splice(0)) world.later(arrive);
        for (const each of [...due]) if (each.left-- === 0) each.call();
        for (const { rig } of sides) {
          rig.engine.checkIntegrity();
          expect(rig.defects).toEqual([]);
          // What is drawn for the other side is no stream here.
          const begun = (id: string): boolean => rig === d && rig.tokens(id).length > 0;
          const open = [...rig.outputs].filter(([id]) => !rig.ended(id)).map(([id]) => begun(id));
          const { waiting, running } = rig.engine.load();
          expect([waiting, running]).toEqual([open.filter((one) => !one).length, open.filter(Boolean).length]);
        }
      };
      let handOffs = 0;
      for (const [i, { which, promptTokens, maxTokens, handOff, pause, abortAfter }] of one.requests.entries()) {
        const whole = Math.floor(promptTokens / blockTokens);
        const tokens = prompt(which, promptTokens);
        const id = `r${i}`;
        if (handOff === null || whole === 0) d.submit(id, tokens, { maxTokens });
        else {
          const blocksOf = (percent: number): number => Math.ceil((whole * percent) / 100);
          const decode = (): void => {
            d.submit(id, tokens, {
              maxTokens,
              handOff: { blocks: blocksOf(handOff.asked), stallMs: 3, deadlineMs: 40 },
            });
            const [first] = naiveAnswer(tokens, 1, [], windows);
            after(handOff.tellAfter, () => d.engine.tellFirstToken(id, first!));
            after(handOff.changeAfter, () => d.engine.changeHandOff(id, blocksOf(handOff.changeTo)));
          };
          const prefill = (): void => {
            if (handOff.prefilled === null || !p.connector.attached) return;
            const { draws } = handOff;
            p.submit(id, tokens, { maxTokens, prefillOnly: { blocks: blocksOf(handOff.prefilled), draws } });
            after(handOff.abortPrefillAfter, () => p.engine.abort(id));
          };
          handOffs++;
          if (handOff.isDecodeFirst) decode();
          prefill();
          if (!handOff.isDecodeFirst) decode();
        }
        after(abortAfter, () => d.engine.abort(id));
        for (let n = 0; n < pause; n++) await advance();
      }
      for (let n = 0; !(p.allEnded() && d.allEnded()); n++) {
        if (n > 10_000) throw new Error('hang: not all requests end');
        await advance();
      }

      const sequences = one.requests.map(({ which, promptTokens, maxTokens, handOff }, i) => {
        const id = `r${i}`;
        const whole = Math.floor(promptTokens / blockTokens);
        const answer = naiveAnswer(prompt(which, promptTokens), maxTokens, [], windows);
        const room = d.engine.maxTotalTokens - promptTokens;
        const { finishReason, error } = d.last(id);
        if (error) expect(error.message).toMatch(/^a fault$|no finite numbers/);
        else if (finishReason !== 'abort') expect(d.tokens(id)).toEqual(answer.slice(0, room));
        expect(answer.slice(0, d.tokens(id).length)).toEqual(d.tokens(id));
        const states = d.outputs.get(id)!.flatMap((output) => output.handOff ?? []);
        const told = states.filter(({ readyBlocks }) => readyBlocks === 0).length;
        // First that it has room, then how much has come, always more.
        expect(states.every(({ readyBlocks }, at) => at === 0 || readyBlocks > states[at - 1]!.readyBlocks)).toBe(true);
        const isWhole = finishReason === 'stop' || finishReason === 'length';
        if (handOff && isWhole && promptTokens >= blockTokens) expect(told).toBe(1);
        else expect(told).toBeLessThanOrEqual(1);
        if (p.outputs.has(id)) {
          const last = p.last(id);
          const { draws } = handOff!;
          const isEnd = draws && maxTokens === 1;
          const isWhole = last.finishReason === 'prefilled' || last.finishReason === 'length';
          expect(p.tokens(id)).toEqual(answer.slice(0, draws && (isWhole || p.tokens(id).length > 0) ? 1 : 0));
          if (last.error) expect(last.error.message).toMatch(/a fault|no cache node|no finite numbers/);
          else expect([isEnd ? 'length' : 'prefilled', 'abort']).toContain(last.finishReason);
          const ready = last.handOff?.readyBlocks ?? 0;
          const { refuseStore, busyStore, lostStore, detachAfter } = one.prefill;
          const asked = Math.ceil((whole * (handOff!.prefilled ?? 0)) / 100);
          if (
            last.finishReason === 'prefilled' &&
            refuseStore + busyStore + lostStore === 0 &&
            detachAfter === null &&
            !windows
          )
            expect(
              // Where all of the prompt is computed, more may be stored than was asked for.
              draws ? Math.min(ready, asked) : ready,
            ).toBe(asked);
          const hashes = new SequenceHashes(p.hasher, {});
          hashes.append(Uint32Array.from(prompt(which, promptTokens)));
          if (one.lostBlock === 0 && (windows?.[0] ?? 0) === 0)
            for (let block = 0; block < ready; block++) expect(tier.blocks.has(hashes.keyAt(block))).toBe(true);
        }
        return [...prompt(which, promptTokens), ...answer];
      });

      for (const { rig } of sides) await rig.drain();
      for (const { rig } of sides) {
        const rest = { waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0, loadAheadS: 0 };
        expect(rig.engine.stats()).toMatchObject({ loading: 0, awaiting: 0, exportBlocks: 0 });
        expect(rig.engine.load()).toMatchObject(rest);
        expect(rig.connector.awaiting.size).toBe(0);
        rig.engine.checkIntegrity();
      }
      const { handOffs: begun, handOffEnds } = d.engine.stats();
      expect(begun).toBe(Object.values(handOffEnds).reduce((sum, count) => sum + count, 0));
      expect(begun).toBeLessThanOrEqual(handOffs);
      for (const tokens of sequences) {
        const hashes = new SequenceHashes(d.hasher, {});
        hashes.append(Uint32Array.from(tokens));
        for (const [group, slots] of groupSlotsOf(tokens, windows ?? [0]).entries())
          for (let block = 0; block < hashes.blockCount; block++) {
            const held = tier.blocks.get(`${group === 0 ? '' : `${group}:`}${hashes.keyAt(block)}`);
            if (held) expect(held).toEqual(slots.slice(block * blockTokens, (block + 1) * blockTokens));
          }
      }
      let closed = 0;
      for (const { rig } of sides) rig.engine.close().then(() => closed++, expect.unreachable);
      await world.until(() => closed === 2);
    }),
    { examples: [[lateLoads]], numRuns: Number(process.env.KVTIER_PROPERTY_RUNS ?? 75) },
  );
}, 600_000);

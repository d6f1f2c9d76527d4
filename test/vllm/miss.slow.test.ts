/**
 * What prompts that nobody holds cost with the connector: real vLLM engines on a CPU, one with it and two without, in turns drawn by lot
 * with the same prompts, each of which is new to all. The second without it says what two engines differ by that differ in nothing.
 * Figures are medians over rounds of what one took of what another took right before or after it. `npm run test:vllm -- miss`.
 */
import { afterEach, describe, expect, it } from 'vitest';
import { type Run, type VllmEngine, vllmMissing } from './engine.ts';
import { cpuMs, firstMs, median, ratio, wallMs } from './measured.ts';
import { fresh, shuffled } from './prompts.ts';
import { expectEqual, patient, tell, VllmRig } from './rig.ts';

const missing = vllmMissing();
const rounds = Number(process.env.KVTIER_VLLM_ROUNDS ?? 7);
/** Engines are made anew so often: where their memory lies makes two alike differ, as long as they live. */
const starts = Number(process.env.KVTIER_VLLM_STARTS ?? 1);

const cases = {
  // Of one request its first token is what counts, of many together all of it.
  'one of 1,000 tokens': { lengths: [1_000], outputs: 2, took: firstMs },
  'one of 2,000 tokens': { lengths: [2_000], outputs: 2, took: firstMs },
  '8 of 500 tokens, 48 more each': { lengths: Array<number>(8).fill(500), outputs: 48, took: wallMs },
};
const asked = (process.env.KVTIER_VLLM_CASES ?? '0,1,2').split(',').map((at) => Object.entries(cases)[Number(at)]!);

type Side = 'alone' | 'connector' | 'control';
const sides: readonly Side[] = ['alone', 'connector', 'control'];
type Came = Record<Side, Run[]>;
const nothing = (): Came => ({ alone: [], connector: [], control: [] });

describe.skipIf(missing !== null)('prompts that nobody holds, in a real vLLM engine', () => {
  let rig: VllmRig;
  afterEach(() => rig.close());

  /** Engines of all sides; a stored block proves that the connector is attached: before that a miss costs nothing. */
  async function engines(): Promise<Record<Side, VllmEngine>> {
    const shape = { model: 'llama-8k', tokens: 2_100, stepTokens: 2_048 } as const;
    const made = {} as Record<Side, VllmEngine>;
    for (const side of shuffled(sides)) {
      made[side] = await rig.engine({ ...shape, ...(side === 'connector' ? { extra: patient } : { socket: null }) });
      await made[side].generate([fresh(1, 2_000)], { tokens: 4 });
    }
    await made.connector.settle(1);
    await made.connector.reset();
    const attached = await made.connector.generate([fresh(1, 2_000)], { tokens: 4 });
    expect(attached.external_hits).toBeGreaterThan(1_900);
    return made;
  }

  function told(which: string, came: readonly Came[]): void {
    for (const [at, [what, { took }]] of asked.entries()) {
      const of = (over: Side, under: Side, read: (run: Run) => number): string =>
        ratio(came[at]![over].map(read), came[at]![under].map(read));
      tell(
        `miss, ${which}, ${what}: ${took === firstMs ? 'first token' : 'all of it'}: connector ÷ alone ${of('connector', 'alone', took)}, ÷ control ${of('connector', 'control', took)}, control ÷ alone ${of('control', 'alone', took)}; CPU ${of('connector', 'alone', cpuMs)}, ${of('connector', 'control', cpuMs)}, ${of('control', 'alone', cpuMs)} (${median(came[at]!.alone.map(took)).toFixed(0)} ms alone, ${came[at]!.alone.length} rounds)`,
      );
    }
  }

  it('with the connector and without', { timeout: 40 * 60_000 }, async () => {
    rig = new VllmRig();
    await rig.node.start();
    let seed = 100;
    const whole = asked.map(nothing);
    for (let start = 0; start < starts; start++) {
      const made = await engines();
      const came = asked.map(nothing);
      for (let round = -1; round < rounds; round++) {
        for (const [at, [, { lengths, outputs }]] of asked.entries()) {
          const prompts = lengths.map((length) => fresh(seed++, length));
          const runs = {} as Record<Side, Run>;
          for (const side of shuffled(sides)) {
            runs[side] = await made[side].generate(prompts, { tokens: outputs });
            await made.connector.settle(0.3); // what the one stores is not in the other's way
          }
          expectEqual(runs.connector, runs.alone);
          expect(runs.connector.external_hits).toBe(0);
          // The first round only warms up.
          if (round >= 0) for (const side of sides) came[at]![side].push(runs[side]);
        }
        if (round >= Math.min(5, rounds - 1)) told(`start ${start + 1}`, came); // a run that is cut short has shown something, too
      }
      for (const [at, one] of came.entries()) for (const side of sides) whole[at]![side].push(...one[side]);
      for (const side of sides) await made[side].kill();
    }
    if (starts > 1) told('all starts', whole);
  });
});

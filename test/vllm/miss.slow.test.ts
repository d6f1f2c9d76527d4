/**
 * What prompts that nobody holds cost with the connector: two real vLLM engines on a CPU, one without it, in turns with the same prompts,
 * each of which is new to both. Figures are medians over rounds of what one took of what the other took. `npm run test:vllm`.
 */
import { afterEach, describe, expect, it } from 'vitest';
import { type Run, type VllmEngine, vllmMissing } from './engine.ts';
import { cpuMs, firstMs, median, ratio, wallMs } from './measured.ts';
import { fresh } from './prompts.ts';
import { expectEqual, patient, tell, VllmRig } from './rig.ts';

const missing = vllmMissing();
const rounds = Number(process.env.KVTIER_VLLM_ROUNDS ?? 7);

describe.skipIf(missing !== null)('prompts that nobody holds, in a real vLLM engine', () => {
  let rig: VllmRig;
  afterEach(() => rig.close());

  it('with the connector and without', { timeout: 20 * 60_000 }, async () => {
    rig = new VllmRig();
    await rig.node.start();
    const shape = { model: 'llama-8k', tokens: 2_100, stepTokens: 2_048 } as const;
    const alone = await rig.engine({ ...shape, socket: null });
    const connector = await rig.engine({ ...shape, extra: patient });
    // A stored block proves that it is attached: before that a miss costs nothing.
    for (const engine of [alone, connector]) await engine.generate([fresh(1, 2_000)], { tokens: 4 });
    await connector.settle(1);
    await connector.reset();
    const attached = await connector.generate([fresh(1, 2_000)], { tokens: 4 });
    expect(attached.external_hits).toBeGreaterThan(1_900);

    const kinds = {
      // Of one request its first token is what counts, of many together all of it.
      'one of 1,000 tokens': { lengths: [1_000], outputs: 2, took: firstMs },
      'one of 2,000 tokens': { lengths: [2_000], outputs: 2, took: firstMs },
      '8 of 500 tokens, 48 more each': { lengths: Array<number>(8).fill(500), outputs: 48, took: wallMs },
    };
    const came = Object.keys(kinds).map(() => ({ alone: [] as Run[], connector: [] as Run[] }));
    /** So far: the first round only warms up. */
    const told = (count: number): void => {
      for (const [at, [what, { took }]] of Object.entries(kinds).entries()) {
        const runs = { alone: came[at]!.alone.slice(1), connector: came[at]!.connector.slice(1) };
        const figures = (read: (run: Run) => number): string => ratio(runs.connector.map(read), runs.alone.map(read));
        tell(
          `miss, ${what}: connector ÷ alone: ${took === firstMs ? 'first token' : 'all of it'} ${figures(took)}, CPU ${figures(cpuMs)} (${median(runs.alone.map(took)).toFixed(0)} ms alone, ${count} rounds)`,
        );
      }
    };
    let seed = 100;
    for (let round = -1; round < rounds; round++) {
      for (const [at, { lengths, outputs }] of Object.values(kinds).entries()) {
        const prompts = lengths.map((length) => fresh(seed++, length));
        const run = (engine: VllmEngine): Promise<Run> => engine.generate(prompts, { tokens: outputs });
        // Who comes second finds the caches of the processor as the other left them: they take turns.
        const turns = [
          async () => came[at]!.alone.push(await run(alone)),
          async () => came[at]!.connector.push(await run(connector)),
        ];
        for (const turn of round % 2 === 0 ? turns : turns.toReversed()) {
          await turn();
          await connector.settle(0.3); // what the one stores is not in the other's way
        }
      }
      if (round >= Math.min(2, rounds - 1)) told(round + 1); // a run that is cut short has shown something, too
    }
    for (const { alone: without, connector: by } of came) {
      for (const [which, run] of by.entries()) {
        expectEqual(run, without[which]!);
        expect(run.external_hits).toBe(0);
      }
    }
  });
});

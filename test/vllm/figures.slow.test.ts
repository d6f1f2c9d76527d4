/**
 * Figures of a real vLLM engine on a CPU, engines alternating: what a prompt that nobody holds costs with the connector, and how soon
 * the first token of one that the node holds comes, by the connector and by native offloading. `npm run test:vllm`.
 */
import { afterEach, describe, expect, it } from 'vitest';
import { type Run, type VllmEngine, vllmMissing } from './engine.ts';
import { expectEqual, patient, tell, VllmRig } from './rig.ts';

const missing = vllmMissing();
const minutes = (n: number): number => n * 60_000;
const rounds = Number(process.env.KVTIER_VLLM_ROUNDS ?? 7);

const median = (values: readonly number[]): number => values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)]!;
const prompt = (round: number, tokens: number): number[] =>
  Array.from({ length: tokens }, (_, at) => 10 + ((at * 7 + round * 389 + (at >> 4) * round) % 2_000));
const firstMs = (run: Run): number => run.first_s[0]! * 1_000;

describe.skipIf(missing !== null)('figures of a real vLLM engine', () => {
  let rig: VllmRig;
  afterEach(() => rig.close());

  it('a miss, and a hit by each connector, beside the engine alone', { timeout: minutes(20) }, async () => {
    rig = new VllmRig();
    await rig.node.start();
    const more = { model: 'llama', tokens: 4_096 } as const;
    const alone = await rig.engine({ ...more, socket: null });
    const connector = await rig.engine({ ...more, extra: patient });
    const offloading = await rig.engine({ ...more, transfer: rig.offloading(patient) });
    const engines = { alone, connector, offloading };
    for (const engine of Object.values(engines)) await engine.generate([prompt(99, 600)], { tokens: 4 });

    for (const tokens of [1_000, 3_500]) {
      // Each engine computes prompts of its own: nobody holds them.
      const missed: Record<string, Run[]> = { alone: [], connector: [], offloading: [] };
      for (let round = 0; round < rounds; round++)
        for (const [at, [name, engine]] of Object.entries(engines).entries())
          missed[name]!.push(await engine.generate([prompt(tokens + 3 * round + at, tokens)], { tokens: 8 }));
      const cpu = (name: string): number => median(missed[name]!.map((run) => run.cpu_s * 1_000));
      const first = (name: string): number => median(missed[name]!.map(firstMs));
      for (const name of ['connector', 'offloading'])
        tell(
          `miss of ${tokens} tokens, ${name} ÷ alone: CPU ${(cpu(name) / cpu('alone')).toFixed(3)}, first token ${(first(name) / first('alone')).toFixed(3)} (${first('alone').toFixed(0)} ms alone)`,
        );

      // What the connector stored both of them load.
      await connector.settle();
      const hit: Record<string, number[]> = { connector: [], offloading: [] };
      for (let round = 0; round < rounds; round++)
        for (const [name, engine] of [
          ['connector', connector],
          ['offloading', offloading],
        ] as [string, VllmEngine][]) {
          await engine.reset();
          const text = prompt(tokens + 3 * round + 1, tokens);
          const run = await engine.generate([text], { tokens: 8 });
          expectEqual(run, missed.connector![round]!);
          expect(run.results[0]!.cached).toBeGreaterThanOrEqual(0.95 * (tokens - 16));
          hit[name]!.push(firstMs(run));
        }
      for (const [name, values] of Object.entries(hit))
        tell(
          `hit of ${tokens} tokens, ${name}: first token ${median(values).toFixed(1)} ms, cold ${first('alone').toFixed(0)} ms`,
        );
      expect(median(hit.connector!)).toBeLessThan(first('alone'));
    }
  });
});

/**
 * How soon the first token of a prompt comes that was computed before: by the connector, by native offloading over a node, and by vLLM's
 * own tiers, with the same prompts; then after a restart of the engines. `npm run test:vllm`.
 */
import { join } from 'node:path';
import { afterEach, describe, expect, it } from 'vitest';
import { type EngineOptions, type VllmEngine, vllmMissing } from './engine.ts';
import { firstMs, median } from './measured.ts';
import { fresh } from './prompts.ts';
import { expectEqual, patient, tell, VllmRig } from './rig.ts';

const missing = vllmMissing();
const rounds = Number(process.env.KVTIER_VLLM_ROUNDS ?? 7);
const lengths = (process.env.KVTIER_VLLM_LENGTHS ?? '1000,2000,4000,8000').split(',').map(Number);
/** Hits of 1,000 tokens, of each kind, before those that are compared. */
const warmHits = Number(process.env.KVTIER_VLLM_WARM_HITS ?? 100);
/** Of each length: of one text there is one first time after a restart, and long ones take long to compute. */
const textsOf = (length: number): number => (length <= 2_000 ? 3 : 1);
const bytes = 1 << 29;
const shape = { model: 'llama-long', tokens: 8_200, stepTokens: 2_048 } as const;

/** vLLM's own offloading connector (native_tiers.py). */
const native = (spec: object): object => ({
  kv_connector: 'OffloadingConnector',
  kv_role: 'kv_both',
  kv_connector_extra_config: { cpu_bytes_to_use: bytes, ...spec },
});

describe.skipIf(missing !== null)('prompts that were computed before, in a real vLLM engine', () => {
  let rig: VllmRig;
  afterEach(() => rig.close());

  it("by the connector and by vLLM's own tiers", { timeout: 30 * 60_000 }, async () => {
    rig = new VllmRig({ arena: { bytes }, disk: { bytes: 1 << 30 } });
    await rig.node.start();
    const told = await rig.engine({ ...shape, transfer: native({}) }).then(
      (engine) => engine.stop().then(() => 'it runs'),
      (error: Error) => /^.*CPU Offloading is.*$/m.exec(error.message)?.[0].trim() ?? error.message.slice(0, 200),
    );
    tell(`vLLM's own CPU offload on this platform, as it is: ${told}`);

    const files = { secondary_tiers: [{ type: 'fs', root_dir: join(rig.folder, 'files') }] };
    const plain = { spec_module_path: 'native_tiers' };
    const kinds: Record<string, Omit<EngineOptions, 'model' | 'socket'>> = {
      connector: { extra: patient },
      'native offloading over the node': { transfer: rig.offloading(patient) },
      "vLLM's CPU memory": { transfer: native({ ...plain, spec_name: 'PlainCpu' }) },
      "vLLM's file system tier": { transfer: native({ ...plain, spec_name: 'PlainTiers', ...files }) },
    };
    const names = Object.keys(kinds);
    const engines = new Map<string, VllmEngine>();
    const start = async (): Promise<void> => {
      for (const name of names) {
        await engines.get(name)?.kill();
        const engine = await rig.engine({ ...shape, ...kinds[name]! });
        await engine.generate([fresh(7, 600)], { tokens: 4 });
        await engine.settle(1); // and is attached
        engines.set(name, engine);
      }
    };
    const ask = (name: string, length: number, text: number) =>
      engines.get(name)!.generate([fresh(length * 10 + text, length)], { tokens: 4 });

    /**
     * A prompt of its own, computed and then loaded so many times: what is done for the first time takes longer, whoever does it, and a
     * node's code is compiled during its first hundred loads. Returns the first tokens' times, by name.
     */
    const warm = async (times: number): Promise<Map<string, number[]>> => {
      const came = new Map(names.map((name) => [name, [] as number[]]));
      for (let time = 0; time <= times; time++)
        for (const name of names) {
          const engine = engines.get(name)!;
          const run = await engine.generate([fresh(9, 1_000)], { tokens: 4 });
          if (time === 0) await engine.settle(1);
          else came.get(name)!.push(firstMs(run));
          await engine.reset();
        }
      return came;
    };

    await start();
    const early = await warm(warmHits);
    const among = (from: number, to: number): string =>
      names.map((name) => `${name} ${median(early.get(name)!.slice(from, to)).toFixed(1)}`).join(', ');
    for (const from of [3, 20, 50].filter((each) => each < warmHits))
      tell(
        `hits ${from} to ${Math.min(warmHits, 2 * from)} of 1,000 tokens, first token in ms: ${among(from, 2 * from)}`,
      );
    for (const length of lengths) {
      const texts = textsOf(length);
      const cold: number[] = [];
      const right = new Map<number, Awaited<ReturnType<typeof ask>>>();
      for (let text = 0; text < texts; text++)
        // What the connector stored is there for native offloading over the same node.
        for (const name of names.filter((each) => each !== names[1])) {
          const run = await ask(name, length, text);
          if (name === names[0]) {
            right.set(text, run);
            cold.push(firstMs(run));
          } else expectEqual(run, right.get(text)!);
        }
      for (const name of names) await engines.get(name)!.settle(1);
      const came = new Map(names.map((name) => [name, [] as number[]]));
      for (let round = 0; round < rounds; round++)
        for (let turn = 0; turn < names.length; turn++) {
          const name = names[(round + turn) % names.length]!;
          await engines.get(name)!.reset();
          const run = await ask(name, length, round % texts);
          expectEqual(run, right.get(round % texts)!);
          expect(run.results[0]!.cached, name).toBeGreaterThanOrEqual(0.95 * (length - 16));
          came.get(name)!.push(firstMs(run));
        }
      tell(
        `hit of ${length} tokens, first token in ms: ${names.map((name) => `${name} ${median(came.get(name)!).toFixed(1)}`).join(', ')}; computed ${median(cold).toFixed(0)}`,
      );
      expect(median(came.get('connector')!)).toBeLessThan(median(cold));
    }

    await start();
    await warm(3); // the node is what it was
    for (const length of lengths) {
      const came = new Map(names.map((name) => [name, [] as string[]]));
      const first = new Map(names.map((name) => [name, [] as number[]]));
      for (let text = 0; text < textsOf(length); text++)
        for (const name of names) {
          const run = await ask(name, length, text);
          first.get(name)!.push(firstMs(run));
          came.get(name)!.push(`${run.results[0]!.cached}`);
        }
      tell(
        `engines restarted, ${length} tokens, first token in ms: ${names.map((name) => `${name} ${median(first.get(name)!).toFixed(1)} (${came.get(name)!.join(', ')} cached)`).join(', ')}`,
      );
      for (const cached of came.get('connector')!) expect(Number(cached)).toBeGreaterThanOrEqual(0.95 * (length - 16));
    }
  });
});

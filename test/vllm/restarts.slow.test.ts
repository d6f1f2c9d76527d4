/**
 * The connector inside a real vLLM engine, over restarts of the engine and of the node, with one rank and two: equal tokens,
 * and what is whole and shared is loaded. `npm run test:vllm -- restarts`.
 */
import { existsSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, describe, expect, it } from 'vitest';
import { type Run, vllmMissing } from './engine.ts';
import { distinctTokens, prompts } from './prompts.ts';
import { cachedShare, counted, expectEqual, patient, tell, VllmRig } from './rig.ts';
import { Kept } from './right.ts';

const missing = vllmMissing();
const count = Number(process.env.KVTIER_VLLM_PROMPTS ?? 200);
const all = prompts(count, 12);
const timeout = 30 * 60_000;

describe.skipIf(missing !== null)('restarts beside a real vLLM engine', () => {
  let rig: VllmRig;
  const kept = new Kept();
  afterEach(() => rig.close());
  afterAll(() => kept.close());

  for (const [model, ranks] of [
    ['llama', 1],
    ['mistral-sw', 1],
    ['gemma3', 1],
    ['llama', 2],
    ['gemma3', 2],
  ] as const) {
    const what = `${model} x${ranks}`;
    const place = (): { dataDir: string; stored: string } => {
      const dataDir = join(kept.folder, `${model}-x${ranks}-${count}`);
      return { dataDir, stored: `${dataDir}.stored` };
    };
    const shape = { model, ranks, extra: patient };

    /** A node with what an engine stored; `rig.node` runs. */
    async function store(right: Run): Promise<void> {
      const { dataDir, stored } = place();
      for (const old of [stored, dataDir]) rmSync(old, { recursive: true, force: true });
      await rig.node.start();
      const engine = await rig.engine(shape);
      expectEqual(await engine.generate(all), right);
      await engine.settle();
      await engine.kill();
      writeFileSync(stored, '');
    }

    async function expectLoaded(after: string, right: Run): Promise<void> {
      const engine = await rig.engine(shape);
      const run = await engine.generate(all);
      expectEqual(run, right);
      const share = cachedShare(run, all);
      tell(
        `${what}, ${after} restarted: ${(100 * share).toFixed(1)} % of whole blocks cached, ${run.external_hits} tokens by the connector, ${distinctTokens(all)} distinct (${counted(run)})`,
      );
      expect(share).toBeGreaterThanOrEqual(0.95);
      expect(run.external_hits).toBeGreaterThanOrEqual(0.95 * distinctTokens(all));
    }

    it(`${what}: answers as without it, and loads after a restart of the engine`, { timeout }, async () => {
      rig = new VllmRig({ dataDir: place().dataDir });
      const right = await kept.right(rig, model, all);
      await store(right);
      await expectLoaded('engine', right);
    });

    it(`${what}: loads after a restart of the node`, { timeout }, async () => {
      rig = new VllmRig({ dataDir: place().dataDir });
      const right = await kept.right(rig, model, all);
      if (!existsSync(place().stored)) {
        await store(right);
        await rig.node.signal('SIGTERM');
      }
      await rig.node.start();
      await expectLoaded('node', right);
    });
  }
});

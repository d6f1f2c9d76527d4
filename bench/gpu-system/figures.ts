/**
 * Figures of the CUDA backend through the whole system: API server, worker and cache node as `kvtier up` starts them.
 *
 *   start         from the command to the address, to an attached worker, to the first token
 *   cold, warm    time to first token of the same prompt: computed, from what the engine still has, from the arena, and from the disk after
 *                 every process was killed. Warm answers are equal among each other (docs/gpu.md, "Warm as cold")
 *   young         warm as well, from the arena: the first of these that programs just started are asked for
 *   decodes       many at once, whose blocks are exported meanwhile, beside the same ones without a tier (decodes.ts)
 *
 * Each is handed on as it is measured.
 */
import { join } from 'node:path';
import type { Launched } from '@kvtier/cli';
import { type Figure, median, time } from '../figures.ts';
import { decodesFigure } from './decodes.ts';
import { again, ask, hits, kvtier, promptOf, type SystemCase, start } from './systems.ts';

type Sizes = Pick<SystemCase, 'arenaBytes' | 'diskBytes' | 'prompts' | 'youngHits' | 'decodes' | 'decodeTokens'>;

/** Arena and disk hold all prompts. A model that is not counted in billions is there to show that all of it runs. */
export function sizesOf(model: string): Sizes {
  return /:\d+(\.\d+)?b$/.test(model)
    ? { arenaBytes: '16GiB', diskBytes: '24GiB', prompts: 4, youngHits: 120, decodes: 32, decodeTokens: 256 }
    : { arenaBytes: '256MiB', diskBytes: '512MiB', prompts: 2, youngHits: 8, decodes: 2, decodeTokens: 32 };
}

/** Of a prompt, from what the engine has and from the arena by turns: a prompt is cold once only, and hits differ from one to the next. */
const hitsEach = 5;

export async function systemFigures(one: SystemCase, told: (figure: Figure) => void, by = kvtier): Promise<void> {
  const name = `${one.model.replace('random:', '')}${one.maxStepTokens === null ? '' : `_steps_${one.maxStepTokens}`}`;
  const place = { tier: true, dataDir: join(one.scratchDir, `gpu-${name}`) };
  const { system, parts } = await start(by, one, place);
  let current: Launched | undefined = system;
  try {
    const prompts = Array.from({ length: one.prompts }, (_, i) => promptOf(one.promptTokens, i));
    const first = await ask(by, current, prompts[0]!);
    for (const [part, ms] of [...parts, ['first_token', first.ttftMs] as const]) {
      const whole = parts.reduce((sum, [, each]) => sum + each, first.ttftMs);
      told(time(`start_${part}_${name}`, ms, 'ms', whole, 'the whole start, to the first token'));
    }
    const young = await hits(by, current, prompts[0]!, one.youngHits);
    const times: Record<'cold' | 'engine' | 'arena' | 'disk', number[]> = { cold: [], engine: [], arena: [], disk: [] };
    // One more than is asked for: the first has paid for pages and threads.
    for (const prompt of prompts.slice(1)) {
      const cold = await ask(by, current, prompt);
      times.cold.push(cold.ttftMs);
      for (let hit = 0; hit < hitsEach; hit++) {
        const near = await again(by, current, prompt);
        const warm = await ask(by, current, prompt);
        times.engine.push(near.ttftMs);
        times.arena.push(warm.ttftMs);
        if (near.tokenIds[0] !== warm.tokenIds[0]) {
          throw new Error(`${name}: another first token over blocks that came back than over the same that never left`);
        }
        if (!warm.tokensByTier.arena) throw new Error(`${name}: nothing came from the arena`);
      }
    }
    const cold = median(times.cold);
    const limit = 'cold, same prompts, same run';
    told(time(`ttft_cold_${one.promptTokens}_${name}`, cold, 'ms', cold, 'itself'));
    told(time(`ttft_engine_${one.promptTokens}_${name}`, median(times.engine), 'ms', cold, limit));
    told(time(`ttft_arena_${one.promptTokens}_${name}`, median(times.arena), 'ms', cold, limit));
    told(time(`ttft_young_${one.promptTokens}_${name}`, median(young.slice(1, 6)), 'ms', cold, `${limit}, later`));
    await by.waitForWriteDown(current.url);
    await current.killAll();
    current = undefined; // and where the next one does not start, that is what is told
    current = (await start(by, one, place)).system;
    await hits(by, current, promptOf(one.promptTokens, one.prompts), one.youngHits); // pages, threads and code again
    for (const prompt of prompts.slice(1)) {
      const warm = await ask(by, current, prompt);
      if (!warm.tokensByTier.disk) throw new Error(`${name}: nothing came from the disk`);
      times.disk.push(warm.ttftMs);
    }
    told(time(`ttft_disk_${one.promptTokens}_${name}`, median(times.disk), 'ms', cold, limit));
  } finally {
    await current?.stop();
  }
  if (one.decodes > 0) told(await decodesFigure(by, one, name));
}

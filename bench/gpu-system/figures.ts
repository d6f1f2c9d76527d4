/**
 * Figures of the CUDA backend through the whole system: API server, worker and cache node as `kvtier up` starts them.
 *
 *   start         from the command to the address, to an attached worker, to the first token
 *   cold, warm    time to first token of the same prompt: computed, from what the engine still has, from the arena, and from the disk after
 *                 every process was killed. Warm answers are equal among each other (docs/gpu.md, "Warm as cold")
 *   young         warm as well, from the arena: the first of these that programs just started are asked for
 *   decodes       many at once, whose blocks are exported meanwhile, beside the same ones without a tier
 *
 * Each is handed on as it is measured.
 */
import { join } from 'node:path';
import { complete, type Launched, launch, resetPrefixCache, waitForWriteDown, waitUntilServing } from '@kvtier/cli';
import { type Figure, median, rate, time } from '../figures.ts';

export interface SystemCase {
  readonly backend: 'auto' | 'cpu' | 'cuda';
  readonly model: string;
  readonly arenaBytes: string;
  readonly diskBytes: string;
  readonly promptTokens: number;
  /** Prompts, each asked cold, warm and after a restart. */
  readonly prompts: number;
  /** Hits after each start that are told as `young` and count for nothing else: V8 compiles our programs while they come. */
  readonly youngHits: number;
  /** Requests that decode at a time; 0: that part is left out. */
  readonly decodes: number;
  readonly decodeTokens: number;
  readonly maxStepTokens: number | null;
  readonly scratchDir: string;
}

type Sizes = Pick<SystemCase, 'arenaBytes' | 'diskBytes' | 'prompts' | 'youngHits' | 'decodes' | 'decodeTokens'>;

/** Arena and disk hold all prompts. A model that is not counted in billions is there to show that all of it runs. */
export function sizesOf(model: string): Sizes {
  return /:\d+(\.\d+)?b$/.test(model)
    ? { arenaBytes: '16GiB', diskBytes: '24GiB', prompts: 4, youngHits: 120, decodes: 32, decodeTokens: 256 }
    : { arenaBytes: '256MiB', diskBytes: '512MiB', prompts: 2, youngHits: 8, decodes: 2, decodeTokens: 32 };
}

const startMs = 300_000;
/** Of a prompt, from what the engine has and from the arena by turns: a prompt is cold once only, and hits differ from one to the next. */
const hitsEach = 5;
const decodePromptTokens = 64;

/** How a system is started and asked. */
const kvtier = { complete, launch, resetPrefixCache, waitForWriteDown, waitUntilServing };
export type Kvtier = typeof kvtier;

export async function systemFigures(one: SystemCase, told: (figure: Figure) => void, by = kvtier): Promise<void> {
  const name = `${one.model.replace('random:', '')}${one.maxStepTokens === null ? '' : `_steps_${one.maxStepTokens}`}`;
  const start = (tier: boolean, dataDir: string) => started(by, one, tier, join(one.scratchDir, dataDir));
  const { system, parts } = await start(true, `gpu-${name}`);
  let current = system;
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
    current = (await start(true, `gpu-${name}`)).system;
    await hits(by, current, promptOf(one.promptTokens, one.prompts), one.youngHits); // pages, threads and code again
    for (const prompt of prompts.slice(1)) {
      const warm = await ask(by, current, prompt);
      if (!warm.tokensByTier.disk) throw new Error(`${name}: nothing came from the disk`);
      times.disk.push(warm.ttftMs);
    }
    told(time(`ttft_disk_${one.promptTokens}_${name}`, median(times.disk), 'ms', cold, limit));
    if (one.decodes === 0) return;
    const exporting = await decodeRate(by, current, one);
    await current.stop();
    current = (await start(false, `gpu-${name}-plain`)).system;
    const plain = await decodeRate(by, current, one);
    told(rate(`decodes_${one.decodes}_${name}`, exporting, 'tokens/s', plain, 'the same without a tier, same run'));
  } finally {
    await current.stop();
  }
}

type Parts = readonly (readonly [string, number])[];

async function started(
  by: Kvtier,
  one: SystemCase,
  tier: boolean,
  dataDir: string,
): Promise<{ readonly system: Launched; readonly parts: Parts }> {
  const { backend, model, arenaBytes, diskBytes, maxStepTokens } = one;
  const tiers = tier ? ['--arena-bytes', arenaBytes, '--disk-bytes', diskBytes, '--loads', 'always'] : ['--no-tier'];
  const steps = maxStepTokens === null ? [] : ['--max-step-tokens', String(maxStepTokens)];
  const common = ['--port', '0', '--backend', backend, '--model', model, '--data-dir', dataDir];
  const begin = performance.now();
  const system = await by.launch([...common, ...tiers, ...steps]);
  const up = performance.now();
  try {
    await by.waitUntilServing(system.url, tier, startMs);
  } catch (error) {
    await system.killAll();
    throw error;
  }
  return {
    system,
    parts: [
      ['up', up - begin],
      ['attached', performance.now() - up],
    ],
  };
}

/** Token ids of no meaning, other ones for each `number`. */
const promptOf = (tokens: number, number: number): number[] =>
  Array.from({ length: tokens }, (_, i) => 300 + ((i * i * 31 + i * 7 + number * 101) % 1000));

async function ask(by: Kvtier, system: Launched, prompt: readonly number[]) {
  await by.resetPrefixCache(system.url);
  return again(by, system, prompt);
}

/** Times to first token of one prompt, asked so often. */
async function hits(by: Kvtier, system: Launched, prompt: readonly number[], count: number): Promise<number[]> {
  const times: number[] = [];
  for (let hit = 0; hit < count; hit++) times.push((await ask(by, system, prompt)).ttftMs);
  return times;
}

/** With what the engine still has of it. */
function again(by: Kvtier, system: Launched, prompt: readonly number[]) {
  return by.complete(system.url, { prompt, max_tokens: 1, temperature: 0, ignore_eos: true });
}

/** Tokens per second of all together. */
async function decodeRate(by: Kvtier, system: Launched, { decodes, decodeTokens }: SystemCase): Promise<number> {
  const all = async (round: number): Promise<void> => {
    const asked = Array.from({ length: decodes }, (_, i) =>
      by.complete(system.url, {
        prompt: promptOf(decodePromptTokens, 1_000 + round * decodes + i),
        max_tokens: decodeTokens,
        temperature: 0,
        ignore_eos: true,
      }),
    );
    await Promise.all(asked);
  };
  await all(0); // graphs, pages and threads
  const begin = performance.now();
  await all(1);
  return (1000 * decodes * decodeTokens) / (performance.now() - begin);
}

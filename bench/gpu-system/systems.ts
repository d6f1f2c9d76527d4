/** How a system that is measured is started and asked. */
import {
  complete,
  type Launched,
  launch,
  metricValues,
  resetPrefixCache,
  waitForWriteDown,
  waitUntil,
  waitUntilServing,
} from '@kvtier/cli';

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

export const kvtier = {
  complete,
  launch,
  metricValues,
  resetPrefixCache,
  waitForWriteDown,
  waitUntil,
  waitUntilServing,
};
export type Kvtier = typeof kvtier;

const startMs = 300_000;

export interface Place {
  readonly tier: boolean;
  readonly dataDir: string;
  /** Of the GPU's memory; absent: what it takes by itself. */
  readonly gpuShare?: number;
}

export interface Started {
  readonly system: Launched;
  /** Ms until its address, and from there until its worker serves. */
  readonly parts: readonly (readonly [string, number])[];
}

export async function start(by: Kvtier, one: SystemCase, { tier, dataDir, gpuShare }: Place): Promise<Started> {
  const { backend, model, arenaBytes, diskBytes, maxStepTokens } = one;
  const tiers = tier ? ['--arena-bytes', arenaBytes, '--disk-bytes', diskBytes, '--loads', 'always'] : ['--no-tier'];
  const steps = maxStepTokens === null ? [] : ['--max-step-tokens', String(maxStepTokens)];
  const share = gpuShare === undefined ? [] : ['--gpu-memory-utilization', String(gpuShare)];
  const common = ['--port', '0', '--backend', backend, '--model', model, '--data-dir', dataDir];
  const begin = performance.now();
  const system = await by.launch([...common, ...tiers, ...steps, ...share]);
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

/** Token ids of no meaning, other ones for each `number` below 1,000. */
export const promptOf = (tokens: number, number: number): number[] =>
  Array.from({ length: tokens }, (_, i) => 300 + ((i * i * 31 + i * 7 + number * 101) % 1000));

export async function ask(by: Kvtier, system: Launched, prompt: readonly number[]) {
  await by.resetPrefixCache(system.url);
  return again(by, system, prompt);
}

/** With what the engine still has of it. */
export function again(by: Kvtier, system: Launched, prompt: readonly number[]) {
  return by.complete(system.url, { prompt, max_tokens: 1, temperature: 0, ignore_eos: true });
}

/** Times to first token of one prompt, asked so often. */
export async function hits(by: Kvtier, system: Launched, prompt: readonly number[], count: number): Promise<number[]> {
  const times: number[] = [];
  for (let hit = 0; hit < count; hit++) times.push((await ask(by, system, prompt)).ttftMs);
  return times;
}

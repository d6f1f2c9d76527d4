/**
 * How many KV blocks the GPU tier gets: what is left of the share of the device's memory that this worker may use, after the
 * weights and the buffers of its largest step. The sums are vLLM's (`--gpu-memory-utilization`), without a trial run: the
 * worker knows the size of each of its buffers before it allocates them. Pure.
 *
 *     total ├──────────── utilization x total ────────────┤ rest: others, fragmentation
 *           ├ weights ┤ step buffers ┤ context ┤ KV blocks ┤
 *
 * Invariant: weights, step buffers, context and blocks together never exceed the share, nor what was free at start.
 */
import { KvError } from '@kvtier/errors';

/** Of the device, as the runtime says when nothing of the worker's is allocated yet. */
export interface GpuMemory {
  readonly totalBytes: number;
  readonly freeBytes: number;
}

export interface GpuDemand {
  readonly weightBytes: number;
  /** Activations, workspaces, logits, staging: everything but weights and KV. */
  readonly stepBytes: number;
  readonly blockBytes: number;
}

/** How many tokens a step computes at most, and the KV blocks that are left beside its buffers. */
export interface StepSize {
  readonly tokens: number;
  readonly blocks: number;
}

export const defaultGpuMemoryUtilization = 0.9;
/** Of the blocks beside the smallest step: what a larger one's buffers may cost. */
export const mostPoolLoss = 0.1;

/** Block 0 is never used, and a request needs two to make progress. */
const minBlocks = 4;
/** The kernel's table of offsets and block ids are 32-bit. */
const maxBlocks = 2 ** 31 - 1;

/**
 * KV blocks, the null block included, at least 4.
 * @param utilization of all of the device's memory, above 0 and at most 1: what others hold counts as used by them
 * Throws KvError CONFIG when the share is out of range, is not free, or leaves no room for blocks.
 */
export function gpuBlockCount(
  memory: GpuMemory,
  demand: GpuDemand,
  utilization: number = defaultGpuMemoryUtilization,
): number {
  const { totalBytes, freeBytes } = memory;
  const { weightBytes, stepBytes, blockBytes } = demand;
  if (!(utilization > 0 && utilization <= 1))
    throw new KvError('CONFIG', `${told(utilization)}: give a share above 0 and at most 1`);
  const shareBytes = Math.floor(totalBytes * utilization);
  if (freeBytes < shareBytes) {
    const found = `${gib(freeBytes)} of ${gib(totalBytes)} are free`;
    const share = Math.floor((freeBytes / totalBytes) * 100) / 100;
    throw new KvError(
      'CONFIG',
      `${told(utilization)}: ${found}; end what else uses this GPU, or give ${share} or less`,
    );
  }
  const blocks = blocksBeside(memory, demand, utilization);
  if (blocks < minBlocks) {
    const needed = weightBytes + stepBytes + minBlocks * blockBytes;
    const taken = `weights take ${gib(weightBytes)}, a step's buffers ${gib(stepBytes)}`;
    const mend =
      needed <= freeBytes
        ? `give ${Math.ceil((needed / totalBytes) * 100) / 100} or more, or lower maxStepTokens`
        : 'use a smaller model or a larger GPU';
    throw new KvError('CONFIG', `${told(utilization)}: ${taken}, no room for KV blocks; ${mend}`);
  }
  return Math.min(blocks, maxBlocks);
}

/**
 * Of steps of these sizes, ascending, those that may be chosen: the first in any case, as it is what there is without a choice;
 * larger ones while the pool loses no more than `mostPoolLoss` to their buffers.
 * @param demand of a step of so many tokens
 * Throws KvError CONFIG where the first leaves no room for blocks.
 */
export function gpuStepSizes(
  memory: GpuMemory,
  demand: (tokens: number) => GpuDemand,
  utilization: number,
  sizes: readonly number[],
): StepSize[] {
  const [first, ...larger] = sizes;
  const chosen = [{ tokens: first!, blocks: gpuBlockCount(memory, demand(first!), utilization) }];
  const least = Math.ceil(chosen[0]!.blocks * (1 - mostPoolLoss));
  for (const tokens of larger) {
    const blocks = blocksBeside(memory, demand(tokens), utilization);
    if (blocks < Math.max(least, minBlocks)) break;
    chosen.push({ tokens, blocks: Math.min(blocks, maxBlocks) });
  }
  return chosen;
}

function blocksBeside(
  { totalBytes }: GpuMemory,
  { weightBytes, stepBytes, blockBytes }: GpuDemand,
  share: number,
): number {
  return Math.floor((Math.floor(totalBytes * share) - weightBytes - stepBytes) / blockBytes);
}

/** As the configuration and the command have it. */
const told = (utilization: number): string => `gpu.memoryUtilization (--gpu-memory-utilization) ${utilization}`;
export const gib = (bytes: number): string => `${(bytes / 2 ** 30).toFixed(1)} GiB`;

/**
 * How many KV blocks an executor gets: those that fit a number of bytes, or, on a GPU, the share of its memory that this
 * engine may use; and which sizes of steps leave room for them. Known before anything is allocated.
 */
import { KvError } from '@kvtier/errors';
import type { ModelConfig } from '@kvtier/model';
import { kvBlockBytes, numberBytes } from './attention-groups.ts';
import { type Backend, gpuStatus, nativeGpu } from './backend.ts';
import { binding } from './binding.ts';
import type { ExecutorOptions } from './executor.ts';
import { defaultGpuMemoryUtilization, type GpuDemand, gpuStepSizes, type StepSize } from './gpu-memory.ts';
import { nativeShape } from './native-shape.ts';

/** Fewer make no engine: block 0 is never used, and a request needs two to make progress. */
export const minBlocks = 4;
/** Of the KV pool where nothing is said and no GPU is used. */
const defaultKvBytes = 256 * 2 ** 20;
/** Tokens of a step where nothing is said and nothing is measured. */
export const leastStepTokens = 512;
const gpuStepTokens = [leastStepTokens, 1024, 2048, 4096, 8192];

interface Opened {
  readonly config: ModelConfig;
  readonly parameters: number;
  readonly backend: Backend;
}

/**
 * For each size that a step may get, ascending, the blocks of the pool beside it; one where nothing is to be chosen.
 * @throws KvError CONFIG when too few fit, GPU when the device does not answer
 */
export function planSteps(options: ExecutorOptions, opened: Opened): StepSize[] {
  const { config, backend } = opened;
  const { blockCount } = options;
  const sizes = stepSizesOf(options, backend);
  const alone = (blocks: number): StepSize[] => [{ tokens: sizes[0]!, blocks }];
  if (backend.name === 'cpu' && typeof blockCount === 'number') return alone(blockCount);
  const blockBytes = kvBlockBytes(config, options.blockTokens, backend.kvDtype);
  const wanted =
    typeof blockCount === 'number'
      ? blockCount
      : backend.name === 'cpu' || blockCount.kvBytes !== undefined
        ? blocksWithin(blockCount.kvBytes ?? defaultKvBytes, blockBytes)
        : undefined;
  if (wanted !== undefined && sizes.length === 1) return alone(wanted);
  const status = gpuStatus(backend.name, options.gpu?.device ?? 0);
  const memory = { totalBytes: status.totalBytes!, freeBytes: status.freeBytes! };
  const demand = (maxStepTokens: number): GpuDemand => {
    const { blockTokens, maxStepSequences, threads = 1 } = options;
    const limits = { blockTokens, maxStepSequences, threads, maxStepTokens, blockCount: minBlocks };
    return {
      weightBytes: opened.parameters * numberBytes[backend.computeDtype],
      stepBytes: binding(backend.name).gpuStepBytes(nativeShape(config), limits, nativeGpu(backend)),
      blockBytes,
    };
  };
  const { gpuMemoryUtilization = defaultGpuMemoryUtilization } = typeof blockCount === 'number' ? {} : blockCount;
  if (wanted === undefined) return gpuStepSizes(memory, demand, gpuMemoryUtilization, sizes);
  // So many blocks are asked for: sizes beside which they fit into what is free.
  const fits = sizes.slice(1).filter((tokens) => {
    const { weightBytes, stepBytes } = demand(tokens);
    return weightBytes + stepBytes + wanted * blockBytes <= memory.freeBytes;
  });
  return [sizes[0]!, ...fits].map((tokens) => ({ tokens, blocks: wanted }));
}

/** One that is given is not measured; the CPU has one. */
function stepSizesOf({ maxStepTokens, gpu }: ExecutorOptions, backend: Backend): readonly number[] {
  if (maxStepTokens !== 'measured') return [maxStepTokens];
  if (backend.name === 'cpu') return [leastStepTokens];
  const sizes = gpu?.stepSizes ?? (backend.name === 'cuda' ? gpuStepTokens : [leastStepTokens]);
  if (sizes.length > 0 && sizes.every((size, i) => Number.isSafeInteger(size) && size > (sizes[i - 1] ?? 0)))
    return sizes;
  throw new KvError('CONFIG', `gpu.stepSizes ${sizes.join()}: give whole numbers above 0, each larger than the last`);
}

function blocksWithin(kvBytes: number, blockBytes: number): number {
  const blocks = Math.floor(kvBytes / blockBytes);
  if (blocks >= minBlocks) return blocks;
  throw new KvError(
    'CONFIG',
    `kvBytes ${kvBytes}: one KV block of this model takes ${blockBytes} bytes; give ${minBlocks * blockBytes} or more`,
  );
}

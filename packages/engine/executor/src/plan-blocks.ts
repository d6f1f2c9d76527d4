/**
 * How many KV blocks an executor gets: those that fit a number of bytes, or, on a GPU, the share of its memory that this
 * engine may use. Known before anything is allocated.
 */
import { KvError } from '@kvtier/errors';
import type { ModelConfig } from '@kvtier/model';
import { kvBlockBytes, numberBytes } from './attention-groups.ts';
import { type Backend, gpuStatus, nativeGpu } from './backend.ts';
import { binding } from './binding.ts';
import type { BlockBudget, ExecutorOptions } from './executor.ts';
import { gpuBlockCount } from './gpu-memory.ts';
import { nativeShape } from './native-shape.ts';

/** Fewer make no engine: block 0 is never used, and a request needs two to make progress. */
export const minBlocks = 4;
/** Of the KV pool where nothing is said and no GPU is used. */
const defaultKvBytes = 256 * 2 ** 20;

/** @throws KvError CONFIG when too few fit, GPU when the device does not answer */
export function planBlocks(
  options: Omit<ExecutorOptions, 'blockCount'>,
  { config, parameters, backend }: { config: ModelConfig; parameters: number; backend: Backend },
  budget: BlockBudget,
): number {
  const blockBytes = kvBlockBytes(config, options.blockTokens, backend.kvDtype);
  if (backend.name === 'cpu' || budget.kvBytes !== undefined) {
    return blocksWithin(budget.kvBytes ?? defaultKvBytes, blockBytes);
  }
  const status = gpuStatus(backend.name, options.gpu?.device ?? 0);
  const limits = { ...options, blockCount: minBlocks, threads: options.threads ?? 1 };
  return gpuBlockCount(
    { totalBytes: status.totalBytes!, freeBytes: status.freeBytes! },
    {
      weightBytes: parameters * numberBytes[backend.computeDtype],
      stepBytes: binding(backend.name).gpuStepBytes(nativeShape(config), limits, nativeGpu(backend)),
      blockBytes,
    },
    budget.gpuMemoryUtilization,
  );
}

function blocksWithin(kvBytes: number, blockBytes: number): number {
  const blocks = Math.floor(kvBytes / blockBytes);
  if (blocks >= minBlocks) return blocks;
  throw new KvError(
    'CONFIG',
    `kvBytes ${kvBytes}: one KV block of this model takes ${blockBytes} bytes; give ${minBlocks * blockBytes} or more`,
  );
}

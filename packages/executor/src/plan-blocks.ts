/**
 * How many KV blocks an executor gets: those that fit a number of bytes, or, on a GPU, the share of its memory that this
 * engine may use. Known before anything is allocated.
 */
import { KvError } from '@kvtier/errors';
import { kvBlockBytes, numberBytes } from './attention-groups.ts';
import { chooseBackend, gpuStatus, nativeGpu } from './backend.ts';
import { binding } from './binding.ts';
import { nativeShape } from './create-executor.ts';
import type { ExecutorOptions } from './executor.ts';
import { gpuBlockCount } from './gpu-memory.ts';
import { readModelConfig } from './model-config.ts';
import { readTensorTable } from './safetensors.ts';
import { planWeights } from './weights.ts';

/** Fewer make no engine: block 0 is never used, and a request needs two to make progress. */
const minBlocks = 4;
/** Of the KV pool where nothing is said and no GPU is used. */
const defaultKvBytes = 256 * 2 ** 20;

export interface BlockBudget {
  /** Of all KV blocks; undefined: the GPU's share, or 256 MiB on the CPU. */
  readonly kvBytes: number | undefined;
  /** Share of the GPU's memory for weights, steps and KV blocks. */
  readonly gpuMemoryUtilization: number;
}

/** @throws KvError CONFIG when too few fit, and what `createExecutor` throws for the folder and the backend */
export async function planBlocks(options: Omit<ExecutorOptions, 'blockCount'>, budget: BlockBudget): Promise<number> {
  const { modelDir, blockTokens } = options;
  const backend = chooseBackend(options.backend ?? 'cpu', options.gpu);
  const config = await readModelConfig(modelDir);
  const blockBytes = kvBlockBytes(config, blockTokens, backend.kvDtype);
  if (backend.name === 'cpu' || budget.kvBytes !== undefined) {
    return blocksWithin(budget.kvBytes ?? defaultKvBytes, blockBytes);
  }
  const status = gpuStatus(backend.name, options.gpu?.device ?? 0);
  const { parameters } = planWeights(config, await readTensorTable(modelDir), modelDir);
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

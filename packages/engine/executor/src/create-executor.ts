/**
 * Opens a model folder on a backend: files are read and checked here, memory is weighed before anything is allocated, and
 * the backend gets numbers only.
 */
import { createHash } from 'node:crypto';
import { availableParallelism } from 'node:os';
import { KvError } from '@kvtier/errors';
import { type ModelConfig, type ModelFolder, modelDigest, planModel, readModelFolder } from '@kvtier/model';
import { attentionGroups, blockLayers, kvBlockBytes, numberBytes } from './attention-groups.ts';
import { type Backend, chooseBackend, nativeGpu } from './backend.ts';
import { binding, hashFile, type NativeLimits, translate } from './binding.ts';
import type { Executor, ExecutorOptions, KvLayout } from './executor.ts';
import { gib, type StepSize } from './gpu-memory.ts';
import { NativeExecutor } from './native-executor.ts';
import { nativeShape } from './native-shape.ts';
import { leastStepTokens, minBlocks, planSteps } from './plan-blocks.ts';

/** What else belongs to a model: the API server reads it by name, and it must be of the same model. */
const companions = [
  'tokenizer.json',
  'tokenizer_config.json',
  'special_tokens_map.json',
  'generation_config.json',
  'chat_template.jinja',
];

/**
 * Throws KvError: MODEL for a bad folder and for one that changes meanwhile, CONFIG for options that cannot work, GPU when a GPU
 * is asked for and cannot be used.
 */
export async function createExecutor(options: ExecutorOptions): Promise<Executor> {
  const { blockCount } = options;
  const tokens = options.maxStepTokens === 'measured' ? leastStepTokens : options.maxStepTokens;
  checkedLimits(options, { tokens, blocks: typeof blockCount === 'number' ? blockCount : minBlocks });
  const backend = chooseBackend(options.backend ?? 'cpu', options.gpu);
  const executor: { opened?: Executor } = {};
  try {
    return await readModelFolder(options.modelDir, async (folder) => {
      executor.opened = await openExecutor(options, backend, folder);
      return executor.opened;
    });
  } catch (error) {
    await executor.opened?.close();
    throw error;
  }
}

/** The sizes of the model, of a folder whose weights have headers that go with them. @throws KvError MODEL as a start; no weight is read */
export async function checkModelFolder(dir: string): Promise<Pick<ModelConfig, 'vocabSize'>> {
  return (await readModelFolder(dir, planModel)).config;
}

async function openExecutor(options: ExecutorOptions, backend: Backend, folder: ModelFolder): Promise<Executor> {
  for (const name of companions) await folder.watch(name);
  const { config, table, planned } = await planModel(folder);
  const { parameters, ...plan } = planned;
  const sizes = planSteps(options, { config, parameters, backend });
  const limits = checkedLimits(options, sizes[0]!);
  const { family, vocabSize, hiddenSize, intermediateSize, layers, heads, kvHeads, headDim, maxModelTokens } = config;
  const shape = { family, vocabSize, hiddenSize, intermediateSize, layers, heads, kvHeads, headDim, maxModelTokens };
  options.alongside?.({ ...shape, parameters });
  const kv = kvLayout(config, options.blockTokens, backend);
  if (backend.name === 'cpu') checkHostMemory(kv, limits.blockCount, parameters);
  const digest = await modelDigest(config, table.files, hashFile);
  const native = binding(backend.name);
  const handle = await native
    .open(
      nativeShape(config),
      plan,
      limits,
      backend.name === 'cpu' ? undefined : nativeGpu(backend, sizes.length > 1 ? sizes : []),
    )
    .catch((error: unknown) => {
      throw translate(error);
    });
  return new NativeExecutor(native, handle, {
    backend: backend.name === 'cpu' ? 'cpu' : 'cuda',
    model: { ...shape, parameters },
    kv,
    modelDigest: computedAs(digest, backend),
    onPinned: options.onPinned,
  });
}

function checkedLimits(
  options: ExecutorOptions,
  { tokens: maxStepTokens, blocks: blockCount }: StepSize,
): NativeLimits {
  const { blockTokens, maxStepSequences } = options;
  const threads = options.threads ?? availableParallelism();
  const bounds = {
    blockTokens: 1024,
    blockCount: 2 ** 31 - 1,
    threads: 1024,
    maxStepTokens: 2 ** 20,
    maxStepSequences: 65_536,
  };
  const limits = { blockTokens, blockCount, threads, maxStepTokens, maxStepSequences };
  for (const [name, most] of Object.entries(bounds)) {
    const value = limits[name as keyof typeof limits];
    if (!Number.isSafeInteger(value) || value < 1 || value > most) {
      throw new KvError('CONFIG', `executor: ${name} is ${value}; it must be an integer from 1 to ${most}`);
    }
  }
  if (blockCount < 2) throw new KvError('CONFIG', 'executor: blockCount must be at least 2, block 0 is never used');
  return limits;
}

function kvLayout(config: ModelConfig, blockTokens: number, { kvDtype }: Backend): KvLayout {
  const groups = attentionGroups(config.windows);
  return {
    layers: blockLayers(groups),
    kvHeads: config.kvHeads,
    headDim: config.headDim,
    dtype: kvDtype,
    blockTokens,
    blockBytes: kvBlockBytes(config, blockTokens, kvDtype),
    order: 'layer,kv,head,token,dim',
    ...(groups.length > 1 || groups[0]!.windowTokens > 0 ? { groups } : {}),
  };
}

/** The pool is touched at start; where it does not fit the kernel would kill a process instead of failing a call. */
function checkHostMemory(kv: KvLayout, blockCount: number, parameters: number): void {
  const weightBytes = numberBytes.f32 * parameters;
  const neededBytes = kv.blockBytes * blockCount + weightBytes;
  const freeBytes = process.availableMemory();
  if (neededBytes <= freeBytes) return;
  const tenthsLeft = Math.floor(((freeBytes - weightBytes) / 2 ** 30) * 10); // of a GiB, never more than there is
  const fewer = tenthsLeft > 0 ? `lower kvBytes (--kv-bytes) to ${gib((tenthsLeft / 10) * 2 ** 30)} or ` : '';
  const found = `weights and ${blockCount} KV blocks need ${gib(neededBytes)}, ${gib(freeBytes)} are free`;
  throw new KvError('CONFIG', `executor: ${found}; ${fewer}use a smaller model`);
}

/**
 * Keys and values depend on how they were computed, not only on how they are stored: a digest of its own for each type of
 * number. f32 keeps the model's, so that CPU and GPU share what they compute in f32.
 */
function computedAs(digest: Uint8Array, { computeDtype }: Backend): Uint8Array {
  if (computeDtype === 'f32') return digest;
  return new Uint8Array(createHash('sha256').update(digest).update(`computed as ${computeDtype}`).digest());
}

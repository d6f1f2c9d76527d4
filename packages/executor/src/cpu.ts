/** The CPU backend: the Executor interface over the native module. Holds no bytes itself, only who waits for what. */
import { availableParallelism } from 'node:os';
import { InvariantError, invariant, KvError } from '@kvtier/errors';
import { attentionGroups, blockLayers, kvBlockBytes } from './attention-groups.ts';
import { binding, type ExecutorHandle, type NativeShape, translate } from './binding.ts';
import { modelDigest } from './digest.ts';
import type { Executor, ExecutorOptions, KvLayout, ModelShape, Step, StepResult } from './executor.ts';
import { type ModelConfig, readModelConfig } from './model-config.ts';
import { readTensorTable } from './safetensors.ts';
import { planWeights } from './weights.ts';

const elementBytes = 4;

/** Opens a model folder on the CPU. Throws KvError: MODEL for a bad folder, CONFIG for options that cannot work. */
export async function createExecutor(options: ExecutorOptions): Promise<Executor> {
  const { modelDir, blockTokens, blockCount, maxStepTokens, maxStepSequences } = options;
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

  const config = await readModelConfig(modelDir);
  const table = await readTensorTable(modelDir);
  const { parameters, ...plan } = planWeights(config, table, modelDir);
  const { family, vocabSize, hiddenSize, intermediateSize, layers, heads, kvHeads, headDim, maxModelTokens } = config;
  const shape = { family, vocabSize, hiddenSize, intermediateSize, layers, heads, kvHeads, headDim, maxModelTokens };
  const groups = attentionGroups(config.windows);
  const kv: KvLayout = {
    layers: blockLayers(groups),
    kvHeads,
    headDim,
    dtype: 'f32',
    blockTokens,
    blockBytes: kvBlockBytes(config, blockTokens),
    order: 'layer,kv,head,token,dim',
    ...(groups.length > 1 || groups[0]!.windowTokens > 0 ? { groups } : {}),
  };
  const needed = kv.blockBytes * blockCount + elementBytes * parameters;
  // The pool is touched at start; where it does not fit the kernel would kill a process instead of failing a call.
  if (needed > process.availableMemory()) {
    throw new KvError(
      'CONFIG',
      `executor: weights and ${blockCount} KV blocks need ${needed} bytes, ${process.availableMemory()} are free; ` +
        'choose fewer blocks or a smaller model',
    );
  }
  const digest = await modelDigest(config, table.files);
  const handle = await binding()
    .open(nativeShape(config), plan, limits)
    .catch((error: unknown) => {
      throw translate(error);
    });

  return new CpuExecutor(handle, { ...shape, parameters }, kv, blockCount, digest);
}

function nativeShape(config: ModelConfig): NativeShape {
  const groups = attentionGroups(config.windows);
  const { rope, localRope } = config;
  return {
    ...config,
    normOffset: config.normOffset ?? 0,
    attentionScale: config.attentionScale ?? 1 / Math.sqrt(config.headDim),
    embeddingScale: config.embeddingScale ?? 1,
    logitCap: config.logitCap ?? 0,
    gelu: config.gelu ?? false,
    ropes: localRope ? [rope, localRope] : [rope],
    layerKinds: config.windows.map((windowTokens, layer) => {
      const group = groups.findIndex(({ layers }) => layers.includes(layer));
      return {
        windowTokens,
        rope: localRope && windowTokens > 0 ? 1 : 0,
        group,
        slot: groups[group]!.layers.indexOf(layer),
      };
    }),
    groups: groups.length,
    blockLayers: blockLayers(groups),
  };
}

class CpuExecutor implements Executor {
  readonly backend = 'cpu';
  readonly model: ModelShape;
  readonly kv: KvLayout;
  readonly blockCount: number;
  readonly modelDigest: Uint8Array;
  readonly #handle: ExecutorHandle;
  #closed = false;
  #step: Promise<unknown> = Promise.resolve();
  /** Copies in flight per arena; an arena that is being detached takes no new ones. */
  readonly #copies = new Map<number, Set<Promise<unknown>>>();

  constructor(handle: ExecutorHandle, model: ModelShape, kv: KvLayout, blockCount: number, digest: Uint8Array) {
    this.#handle = handle;
    this.model = model;
    this.kv = kv;
    this.blockCount = blockCount;
    this.modelDigest = digest;
  }

  async execute(step: Step): Promise<StepResult> {
    invariant(!this.#closed, 'executor: execute after close');
    const running = call(() => binding().execute(this.#handle, step));
    this.#step = running.catch(() => {});
    return running;
  }

  attachArena(path: string, bytes: number, id: bigint): number {
    invariant(!this.#closed, 'executor: attachArena after close');
    invariant(Number.isSafeInteger(bytes) && bytes > 0, () => `executor: an arena of ${bytes} bytes`);
    try {
      const arena = binding().attachArena(this.#handle, path, bytes, id);
      this.#copies.set(arena, new Set());
      return arena;
    } catch (error) {
      throw translate(error);
    }
  }

  async detachArena(arena: number): Promise<void> {
    const copies = this.#copies.get(arena);
    if (!copies) throw new InvariantError(`executor: arena ${arena} is not attached`);
    this.#copies.delete(arena);
    await Promise.allSettled(copies);
    if (!this.#closed) binding().detachArena(this.#handle, arena);
  }

  exportBlocks(arena: number, blockIds: Int32Array, offsets: Float64Array): Promise<BigUint64Array> {
    return this.#copy(arena, () => binding().exportBlocks(this.#handle, arena, blockIds, offsets));
  }

  importBlocks(
    arena: number,
    blockIds: Int32Array,
    offsets: Float64Array,
    checksums: BigUint64Array,
  ): Promise<Uint8Array> {
    return this.#copy(arena, () => binding().importBlocks(this.#handle, arena, blockIds, offsets, checksums));
  }

  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    await Promise.allSettled([this.#step, ...[...this.#copies.values()].flatMap((copies) => [...copies])]);
    this.#copies.clear();
    binding().close(this.#handle);
  }

  async #copy<T>(arena: number, start: () => Promise<T>): Promise<T> {
    const copies = this.#copies.get(arena);
    if (this.#closed || !copies) throw new InvariantError(`executor: arena ${arena} is not attached`);
    const copy = call(start);
    copies.add(copy);
    try {
      return await copy;
    } finally {
      copies.delete(copy);
    }
  }
}

/** Native calls throw wrong arguments at once and reject with the world's doing later: both become one rejection. */
async function call<T>(start: () => Promise<T>): Promise<T> {
  try {
    return await start();
  } catch (error) {
    throw translate(error);
  }
}

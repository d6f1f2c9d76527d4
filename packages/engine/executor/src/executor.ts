/**
 * The interface of model execution. Two backends implement it: `cpu`, which is the reference, and `cuda`.
 *
 * The KV cache is paged: `blockCount` blocks of `kv.blockTokens` tokens; one block's bytes are contiguous, laid out
 * [layer][K,V][kv head][token][head dim], so that one block is one piece of memory for export and import.
 * Block 0 exists and holds nothing; a block table names it only where a sliding window has moved on (vLLM's null block).
 * A model that mixes kinds of attention has several groups of layers: each sequence has a block table per group, and a
 * block holds the layers of one group.
 *
 * One step runs at a time, on native threads; copies run beside it. A block named by a copy must not be written by a
 * step until the copy's promise has settled: the caller holds it.
 */

import type { ModelShape } from '@kvtier/model';

export interface KvGroup {
  /** Tokens that a token sees, itself included; 0 = all. */
  readonly windowTokens: number;
  /** Layers of the model, by their place in a block. */
  readonly layers: readonly number[];
}

/** How numbers are stored: IEEE 754 single and half, bfloat16, FP8 E4M3 (OCP). */
export type NumberType = 'f32' | 'f16' | 'bf16' | 'e4m3';

/**
 * auto: the GPU where there is one and its backend was built, else the CPU. cuda-emulated: the CUDA backend with its kernels on
 * the CPU, for tests.
 */
export type BackendName = 'auto' | 'cpu' | 'cuda' | 'cuda-emulated';

/** What only a GPU needs to be told. */
export interface GpuSettings {
  /** Index among the devices that can be used. */
  readonly device?: number;
  /** Of weights and activations; default bf16. */
  readonly computeDtype?: Exclude<NumberType, 'e4m3'>;
  /** Of keys and values; default: as computeDtype. */
  readonly kvDtype?: NumberType;
  /** Decode steps as CUDA graphs; default true. */
  readonly graphs?: boolean;
  /** In graphs, a kernel begins before the one before it has ended (Hopper and newer); default true. The same bits. */
  readonly dependentLaunches?: boolean;
  /** All graphs at start instead of each at its first use: a longer start, no slow first step of a size. Default: on a GPU. */
  readonly captureAtStart?: boolean;
  /** Path of cuBLASLt; default: where the system has it; "off": matrix products by kernels of ours only. */
  readonly cublaslt?: string;
  /**
   * A row has the same bits however many others are in its step, up to 64, and in every process; its attention, too, in
   * whatever pieces of two tokens or more its prompt is computed: a little slower.
   */
  readonly equalBits?: boolean;
  /** Sizes of steps that are measured, ascending, where one is chosen; default: 512 to 8,192 on a GPU, 512 on the emulator. */
  readonly stepSizes?: readonly number[];
  /** No step that is chosen so takes longer: what decodes beside it wait for; default 200. */
  readonly longestStepMs?: number;
  /** Folder for what was measured of the GPU; default: the user's cache on a GPU, none on the emulator. */
  readonly choicesFolder?: string;
  /** A step, and a batch of copies, that takes longer means that the GPU hangs. */
  readonly stepDeadlineMs?: number;
  readonly copyDeadlineMs?: number;
}

/** How KV blocks look in memory: equal layouts, and only those, may exchange blocks. */
export interface KvLayout {
  /** Layers in one block: those of one attention group. */
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly dtype: NumberType;
  readonly blockTokens: number;
  /** layers × 2 × kvHeads × headDim × blockTokens × bytes per element */
  readonly blockBytes: number;
  /** Names the order of dimensions: "layer,kv,head,token,dim". */
  readonly order: string;
  /** Attention groups of a model with sliding windows; absent: one of full attention. See attention-groups.ts. */
  readonly groups?: readonly KvGroup[];
}

export interface ExecutorOptions {
  /** A Hugging Face model folder: config.json, *.safetensors. */
  readonly modelDir: string;
  readonly blockTokens: number;
  /** Or what they may take: the number is counted from the model's shapes. */
  readonly blockCount: number | BlockBudget;
  /** Worker threads for compute; default: all cores. */
  readonly threads?: number;
  /** Default: cpu. */
  readonly backend?: BackendName;
  readonly gpu?: GpuSettings;
  /**
   * Upper bounds of one step; buffers are sized by them at start. `measured`: on a GPU the size is chosen there (docs/gpu.md),
   * elsewhere it is the smallest of these.
   */
  readonly maxStepTokens: number | 'measured';
  readonly maxStepSequences: number;
  /** Called while the folder is read, to read what else is needed of it: it is of the same model, or nothing is opened. */
  readonly alongside?: (model: ModelShape) => void;
  /** Of each arena, once, when it is pinned for the GPU or is not. */
  readonly onPinned?: (pin: ArenaPin) => void;
}

export interface BlockBudget {
  /** Of all KV blocks; undefined: the GPU's share, or 256 MiB on the CPU. */
  readonly kvBytes: number | undefined;
  /** Share of the GPU's memory for weights, steps and KV blocks. */
  readonly gpuMemoryUtilization: number;
}

/** Blocks that lie in the arena, and what their payloads' XXH3-64 must be. */
export interface ArenaBlocks {
  readonly arena: number;
  readonly blockIds: Int32Array;
  /** Of the payloads, in bytes. */
  readonly offsets: Float64Array;
  readonly checksums: BigUint64Array;
}

/** Computed tokens of one sequence, whose blocks come in from the arena under the step: no new token lies in them. */
export interface StepImport extends ArenaBlocks {
  /** Index of the sequence. */
  readonly sequence: number;
}

/** One forward pass over a batch of sequences: prefill chunks and decodes mixed. All arrays are indexed by sequence. */
export interface Step {
  /** New token ids of all sequences, one after another: sum(queryTokens). */
  readonly tokenIds: Int32Array;
  /** New tokens per sequence, ≥ 1. */
  readonly queryTokens: Int32Array;
  /** Tokens whose KV is already in the sequence's blocks. */
  readonly computedTokens: Int32Array;
  /**
   * Block ids, row-major [attention group][sequence][blockTableStride]. In a group with a window, blocks that the first
   * new token's window does not reach may be 0, the null block.
   */
  readonly blockTables: Int32Array;
  readonly blockTableStride: number;
  /** 1: sample a token after the sequence's last new token. 0: a prefill chunk that is not the last. */
  readonly sample: Uint8Array;
  /** 0 = greedy. */
  readonly temperature: Float32Array;
  /** 0 = off. */
  readonly topK: Int32Array;
  /** 1 = off. */
  readonly topP: Float32Array;
  /** Seed of this draw: already mixed with the position by the caller, so that a replay draws the same token. */
  readonly seed: BigUint64Array;
  /** Also return the logits of the sampled rows (tests, numerics). */
  readonly wantLogits?: boolean;
  /** At most one: where `importsByLayer`, layer 0 is computed while layer 1 arrives; else the step waits for all of it. */
  readonly import?: StepImport | undefined;
}

export interface StepResult {
  /** One per sequence; -1 where none was sampled, and where its logits are no finite numbers: the others' draws count all the same. */
  readonly tokenIds: Int32Array;
  /** [sampled rows × vocabSize], only with wantLogits. */
  readonly logits: Float32Array | null;
  readonly elapsedUs: number;
  /**
   * With an import: a byte per block as of `importBlocks`, or null when it did not take place. Unless all are 1, the sequence
   * has drawn no token (-1), and the keys and values of its new tokens mean nothing.
   */
  readonly imported?: Uint8Array | null;
}

/** What became of an arena's memory on its way to a GPU. */
export interface ArenaPin {
  readonly bytes: number;
  readonly pinned: boolean;
  /** What it took. */
  readonly seconds: number;
  /** Why it is not pinned; empty when it is. */
  readonly refusal: string;
}

export interface Executor {
  readonly backend: 'cpu' | 'cuda';
  readonly model: ModelShape;
  readonly kv: KvLayout;
  readonly blockCount: number;
  /** Of one step. */
  readonly maxStepTokens: number;
  /** An import with a step overlaps with it. Default: no. */
  readonly importsByLayer?: boolean;
  /** Content digest of the weights and the parts of config.json that change results; part of the namespace. */
  readonly modelDigest: Uint8Array;

  execute(step: Step): Promise<StepResult>;

  /** Map a cache node's arena for the copies below. Throws if the file is not that arena. */
  attachArena(path: string, bytes: number, id: bigint): number;
  /** Unmap after the copies in flight have ended. */
  detachArena(arena: number): Promise<void>;
  /**
   * Copy blocks out of the KV cache into arena payload offsets. Returns the XXH3-64 (seed 0) of each payload, computed
   * while copying.
   */
  exportBlocks(arena: number, blockIds: Int32Array, offsets: Float64Array): Promise<BigUint64Array>;
  /**
   * Copy payloads from the arena into blocks of the KV cache. Returns one byte per block: 1 when the bytes that
   * arrived match the checksum, 0 when not (the block's content is then undefined and must not be used).
   */
  importBlocks(
    arena: number,
    blockIds: Int32Array,
    offsets: Float64Array,
    checksums: BigUint64Array,
  ): Promise<Uint8Array>;

  /** Of a GPU: the arenas that are attached, once it is known. */
  readonly arenaPins?: readonly ArenaPin[];

  /** What runs it and what the start took, for the log. */
  describe?(): Readonly<Record<string, unknown>>;

  close(): Promise<void>;
}

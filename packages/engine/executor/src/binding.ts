/**
 * The one TypeScript mirror of the native executor (`packages/engine/executor/cc/binding*.cc`): same names, same order. The boundary
 * is thin: files are read and checked in TypeScript above it, steps and copies are checked in C++ below it, because they
 * must never touch foreign memory. Errors are thrown as `Error("CODE: message")`; without a code they are defects.
 */
import { existsSync } from 'node:fs';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';
import { InvariantError, KvError } from '@kvtier/errors';
import type { ModelShape, Rope, WeightPlan } from '@kvtier/model';
import type { ArenaPin, Step, StepResult } from './executor.ts';
import type { StepSize } from './gpu-memory.ts';

/** An open executor. Opaque. */
export type ExecutorHandle = { readonly __executor: never };

/** The native numbers of all types (`NumberType` of cuda/gpu/numeric.h). */
export const numberTypes = ['f32', 'f16', 'bf16', 'e4m3'] as const;

/** What one layer sees, and where its keys and values lie. */
export interface LayerKind {
  /** Tokens that a query sees, itself included; 0 = all. */
  readonly windowTokens: number;
  /** Index into `ropes`. */
  readonly rope: number;
  readonly group: number;
  /** Its place among the group's layers inside a block. */
  readonly slot: number;
}

/** The numbers of the forward pass. */
export interface NativeShape extends Omit<ModelShape, 'family' | 'parameters'> {
  readonly rmsEps: number;
  /** Added to the weights of all norms. */
  readonly normOffset: number;
  /** Multiplies q·k. */
  readonly attentionScale: number;
  readonly embeddingScale: number;
  /** Logits are cap · tanh(x / cap); 0 = off. */
  readonly logitCap: number;
  /** GELU in its tanh approximation instead of SiLU. */
  readonly gelu: boolean;
  readonly ropes: readonly Rope[];
  readonly layerKinds: readonly LayerKind[];
  /** Attention groups. */
  readonly groups: number;
  /** Layers that one block has room for. */
  readonly blockLayers: number;
}

export interface NativeLimits {
  readonly blockTokens: number;
  readonly blockCount: number;
  readonly threads: number;
  readonly maxStepTokens: number;
  readonly maxStepSequences: number;
}

/** The GPU's options; types are indices into `numberTypes`. */
export interface NativeGpu {
  readonly device: number;
  readonly compute: number;
  readonly kv: number;
  readonly graphs: boolean;
  readonly dependentLaunches: boolean;
  readonly stepDeadlineUs: number;
  readonly copyDeadlineUs: number;
  readonly captureAtStart: boolean;
  readonly cublaslt: string;
  /** Empty: nothing is kept. */
  readonly choicesFolder: string;
  readonly equalBits: boolean;
  /** One of which is chosen by measurement; empty: the limits say it. */
  readonly stepSizes: readonly StepSize[];
  readonly longestStepUs: number;
}

/** A device; with `count` 0 only `why` is there: what is missing, in one line. */
export interface GpuStatus {
  readonly count: number;
  readonly why: string;
  readonly name?: string;
  /** 10 × major + minor */
  readonly computeCapability?: number;
  readonly multiprocessors?: number;
  readonly totalBytes?: number;
  readonly freeBytes?: number;
}

export interface ExecutorBinding {
  // -- executor (binding.cc) --------------------------------------------------------------------------------------
  /** Load weights, allocate the KV pool and all scratch, on a native thread. */
  open(shape: NativeShape, plan: WeightPlan, limits: NativeLimits, gpu?: NativeGpu): Promise<ExecutorHandle>;
  execute(executor: ExecutorHandle, step: Step): Promise<StepResult>;
  attachArena(executor: ExecutorHandle, path: string, bytes: number, id: bigint): number;
  /** False when no such arena is attached. Unmapped when the copies in flight have ended. */
  detachArena(executor: ExecutorHandle, arena: number): boolean;
  exportBlocks(
    executor: ExecutorHandle,
    arena: number,
    blockIds: Int32Array,
    offsets: Float64Array,
  ): Promise<BigUint64Array>;
  importBlocks(
    executor: ExecutorHandle,
    arena: number,
    blockIds: Int32Array,
    offsets: Float64Array,
    checksums: BigUint64Array,
  ): Promise<Uint8Array>;
  /** Once an arena is pinned for the device or was refused; null where nothing is pinned. */
  pinned(executor: ExecutorHandle, arena: number): Promise<Omit<ArenaPin, 'bytes'> | null>;
  /** As it was opened, or as was chosen by measurement. */
  bounds(executor: ExecutorHandle): Pick<NativeLimits, 'maxStepTokens' | 'blockCount'>;
  /** One line of JSON: what runs the model, and what the start took. */
  describe(executor: ExecutorHandle): string;
  /** Ends its threads, frees its memory. Blocks until a step in flight has ended: await that first. */
  close(executor: ExecutorHandle): void;

  // -- the CUDA backend's module only (cuda/backend_tools.cc) ---------------------------------------------------------
  gpuStatus(device: number): GpuStatus;
  /** Bytes of device memory that steps of these bounds take, beside weights and KV blocks. */
  gpuStepBytes(shape: NativeShape, limits: NativeLimits, gpu: NativeGpu): number;
  /** Emulated only: the next operation of the device hangs or faults, or the next allocation does not fit. */
  gpuInject?(fault: 'none' | 'hang' | 'illegal' | 'memory'): void;

  // -- tools (binding_tools.cc) -----------------------------------------------------------------------------------
  /** XXH3-128 of the bytes of an open file, 16 bytes big-endian. */
  digestFile(fd: number, path: string): Promise<Uint8Array>;
  /** FLOP/s of big square sgemms on OpenBLAS's own threads, the mean of `repeats`; the library is opened for it. */
  sgemmRate(size: number, threads: number, repeats: number, library: string): Promise<number>;
  /** Bytes/s of memcpy in pieces over `totalBytes`, the best of `repeats`. */
  memcpyRate(pieceBytes: number, totalBytes: number, threads: number, repeats: number): Promise<number>;
  /** Bytes/s of reading `totalBytes`. */
  readRate(totalBytes: number, threads: number): Promise<number>;
}

const modules = {
  cpu: 'executor/kvtier_executor.node',
  cuda: 'cuda/kvtier_cuda.node',
  'cuda-emulated': 'cuda-emulated/kvtier_cuda_emulated.node',
} as const;
export type ModuleName = keyof typeof modules;

const fileOf = (name: ModuleName): string =>
  fileURLToPath(new URL(`../../../../build/${modules[name]}`, import.meta.url));

/** Whether a backend was built on this machine. */
export const isBuilt = (name: ModuleName): boolean => existsSync(fileOf(name));

function load(name: ModuleName): ExecutorBinding {
  const file = fileOf(name);
  try {
    return createRequire(import.meta.url)(file) as ExecutorBinding;
  } catch (error) {
    throw new KvError('SETUP', `${file}: cannot be loaded (${(error as Error).message}); run: npm run build`);
  }
}

const loaded = new Map<ModuleName, ExecutorBinding>();
/** The native module, loaded at first use, so that reading a model's config does not need a build. */
export function binding(name: ModuleName = 'cpu'): ExecutorBinding {
  const known = loaded.get(name) ?? load(name);
  loaded.set(name, known);
  return known;
}

/** `digestFile` of the CPU's module. Throws KvError. */
export const hashFile = (fd: number, path: string): Promise<Uint8Array> =>
  binding()
    .digestFile(fd, path)
    .catch((error: unknown) => {
      throw translate(error);
    });

/** What native code threw: "CODE: ..." is the world's doing, anything else is a defect of the caller. */
export function translate(thrown: unknown): Error {
  const message = thrown instanceof Error ? thrown.message : String(thrown);
  const known = KvError.from(thrown, 'IO');
  return known.message === message ? new InvariantError(message) : known;
}

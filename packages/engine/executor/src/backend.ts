/** Which backend runs a model, and what a GPU must know: decided here, once, with the reason when it cannot be. */
import { KvError } from '@kvtier/errors';
import { cacheDir } from '@kvtier/model';
import {
  binding,
  type GpuStatus,
  isBuilt,
  type ModuleName,
  type NativeGpu,
  numberTypes,
  translate,
} from './binding.ts';
import type { BackendName, GpuSettings, NumberType } from './executor.ts';
import type { StepSize } from './gpu-memory.ts';

export interface Backend {
  readonly name: ModuleName;
  readonly computeDtype: NumberType;
  readonly kvDtype: NumberType;
  readonly settings: GpuSettings;
}

/** @throws KvError GPU when a GPU is asked for by name and there is none, SETUP when its backend was not built */
export function chooseBackend(wanted: BackendName, settings: GpuSettings = {}): Backend {
  const name = wanted === 'auto' ? (usableGpu(settings.device ?? 0) ? 'cuda' : 'cpu') : wanted;
  if (name === 'cpu') return { name, computeDtype: 'f32', kvDtype: 'f32', settings };
  if (!isBuilt(name)) {
    throw new KvError(
      'SETUP',
      'backend cuda: it was not built; install the CUDA toolkit 12 or newer (nvcc), then run: npm run build',
    );
  }
  const status = gpuStatus(name, settings.device ?? 0);
  if (status.count === 0)
    throw new KvError('GPU', `backend cuda: ${status.why}; set backend (--backend) to cpu, or mend it`);
  const computeDtype = settings.computeDtype ?? 'bf16';
  return { name, computeDtype, kvDtype: settings.kvDtype ?? computeDtype, settings };
}

/** Why no GPU can be used here, in one line; null when one can. */
export function gpuMissing(): string | null {
  try {
    chooseBackend('cuda');
    return null;
  } catch (error) {
    return KvError.from(error).message;
  }
}

function usableGpu(device: number): boolean {
  if (!isBuilt('cuda')) return false;
  try {
    return gpuStatus('cuda', device).count > 0;
  } catch {
    return false; // "auto" never fails: the CPU is always there
  }
}

/** @throws KvError GPU when the device does not exist or has failed */
export function gpuStatus(name: ModuleName, device: number): GpuStatus {
  try {
    return binding(name).gpuStatus(device);
  } catch (error) {
    throw translate(error);
  }
}

/** `stepSizes`: of which one is to be chosen by measurement. */
export function nativeGpu(
  { name, computeDtype, kvDtype, settings }: Backend,
  stepSizes: readonly StepSize[] = [],
): NativeGpu {
  const { device = 0, graphs = true, dependentLaunches = true, cublaslt = '', equalBits = false } = settings;
  // The emulator runs each size of a step where a GPU records it.
  const { captureAtStart = name === 'cuda' } = settings;
  const { stepDeadlineMs = 60_000, copyDeadlineMs = 5_000, longestStepMs = 200 } = settings;
  return {
    device,
    compute: numberTypes.indexOf(computeDtype),
    kv: numberTypes.indexOf(kvDtype),
    graphs,
    dependentLaunches,
    stepDeadlineUs: stepDeadlineMs * 1000,
    copyDeadlineUs: copyDeadlineMs * 1000,
    captureAtStart,
    cublaslt,
    choicesFolder: settings.choicesFolder ?? (name === 'cuda' ? cacheDir() : ''),
    equalBits,
    stepSizes,
    longestStepUs: longestStepMs * 1000,
  };
}

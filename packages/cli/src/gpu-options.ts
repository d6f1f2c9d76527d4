/** The flags of a GPU, as the engine worker's configuration has them; a wrong value is one line. */
import type { KvError } from '@kvtier/errors';
import { miswritten } from './miswritten.ts';

export interface GpuFlags {
  readonly device?: number;
  readonly memoryUtilization?: number;
  readonly computeDtype?: 'f32' | 'f16' | 'bf16';
  readonly kvDtype?: 'e4m3';
  readonly equalBits?: true;
}

interface GpuValues {
  readonly gpu?: string | undefined;
  readonly 'gpu-memory-utilization'?: string | undefined;
  readonly dtype?: string | undefined;
  readonly 'kv-dtype'?: string | undefined;
  readonly 'equal-bits'?: boolean | undefined;
}

const computeDtypes = ['bf16', 'f16', 'f32'] as const;
const kvDtypes = ['e4m3'] as const;

/** @throws KvError CONFIG */
export function gpuFlags(values: GpuValues): GpuFlags {
  const { gpu, dtype } = values;
  const share = values['gpu-memory-utilization'];
  const kvDtype = values['kv-dtype'];
  if (gpu !== undefined && !/^\d{1,3}$/.test(gpu)) throw wrong('--gpu', gpu, 'the number of a GPU, from 0 on');
  const memoryUtilization = share === undefined ? undefined : Number(share);
  if (memoryUtilization !== undefined && !(memoryUtilization > 0 && memoryUtilization <= 1)) {
    throw wrong('--gpu-memory-utilization', share!, 'a share above 0 and at most 1');
  }
  return {
    ...(gpu !== undefined && { device: Number(gpu) }),
    ...(memoryUtilization !== undefined && { memoryUtilization }),
    ...(dtype !== undefined && { computeDtype: oneOf('--dtype', computeDtypes, dtype) }),
    ...(kvDtype !== undefined && { kvDtype: oneOf('--kv-dtype', kvDtypes, kvDtype) }),
    ...(values['equal-bits'] && { equalBits: true as const }),
  };
}

function oneOf<T extends string>(flag: string, names: readonly T[], value: string): T {
  const found = names.find((name) => name === value);
  if (found === undefined) throw wrong(flag, value, names.length === 1 ? names[0]! : `one of ${names.join(', ')}`);
  return found;
}

const wrong = (flag: string, value: string, what: string): KvError => miswritten(`${flag}: "${value}" is not ${what}`);

/**
 * Rotary position embedding: the angle per position of each pair of dimensions, with the scalings that Hugging Face
 * configs name (transformers' modeling_rope_utils.py). What is not implemented is refused, never ignored.
 */
import { KvError } from '@kvtier/errors';

export interface Rope {
  /** [headDim / 2], radians per position. */
  readonly freqs: Float32Array;
  /** Multiplies cos and sin; 1 except for yarn. */
  readonly scale: number;
}

/** Positions are 32-bit numbers. */
const mostTokens = 2 ** 31 - 1;

/** `parameters`: the config's `rope_parameters` or `rope_scaling`, or null. `where` names the file in errors. */
export function ropeOf(
  parameters: Readonly<Record<string, unknown>> | null,
  theta: number,
  headDim: number,
  maxTokens: number,
  where: string,
): Rope {
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}`);
  const number = (name: string, fallback?: number): number => {
    const value = parameters?.[name] ?? fallback;
    if (typeof value !== 'number' || !Number.isFinite(value) || value <= 0) {
      throw fail(`rope scaling needs "${name}" as a positive number, has ${JSON.stringify(value)}`);
    }
    return value;
  };
  const kind = parameters?.rope_type ?? parameters?.type ?? 'default';
  const half = headDim / 2;
  const plain = Array.from({ length: half }, (_, i) => 1 / theta ** ((2 * i) / headDim));

  switch (kind) {
    case 'default':
      return { freqs: Float32Array.from(plain), scale: 1 };
    case 'linear': {
      const factor = number('factor');
      return { freqs: Float32Array.from(plain, (f) => f / factor), scale: 1 };
    }
    case 'llama3': {
      const factor = number('factor');
      const low = number('low_freq_factor');
      const high = number('high_freq_factor');
      const original = number('original_max_position_embeddings');
      if (high <= low) throw fail('rope scaling llama3 needs high_freq_factor > low_freq_factor');
      return {
        freqs: Float32Array.from(plain, (f) => {
          const wavelength = (2 * Math.PI) / f;
          if (wavelength < original / high) return f;
          if (wavelength > original / low) return f / factor;
          const smooth = (original / wavelength - low) / (high - low);
          return ((1 - smooth) * f) / factor + smooth * f;
        }),
        scale: 1,
      };
    }
    case 'yarn':
      return yarn(plain, theta, headDim, maxTokens, parameters!, number, fail);
    default:
      throw fail(`rope scaling ${JSON.stringify(kind)} is not served; served are default, linear, llama3 and yarn`);
  }
}

/**
 * Tokens of context that a model serves whose config says `maxTokens`: linear and yarn stretch what it was trained on, as vLLM takes them
 * (`_get_and_verify_max_len`); with the others it is said in full. `parameters`: what `ropeOf` took.
 */
export function contextTokens(parameters: Readonly<Record<string, unknown>> | null, maxTokens: number): number {
  const number = (name: string, fallback: number): number => (parameters?.[name] as number | undefined) ?? fallback;
  const kind = parameters?.rope_type ?? parameters?.type;
  const within = (tokens: number): number => Math.min(Math.max(1, Math.floor(tokens)), mostTokens);
  if (kind === 'linear') return within(maxTokens * number('factor', 1));
  if (kind !== 'yarn') return maxTokens;
  const original = number('original_max_position_embeddings', maxTokens);
  return Math.max(maxTokens, within(original * number('factor', maxTokens / original)));
}

/** YaRN (Peng et al. 2023): high frequencies kept, low ones interpolated, a linear ramp between, and a softer softmax. */
function yarn(
  plain: readonly number[],
  theta: number,
  headDim: number,
  maxTokens: number,
  parameters: Readonly<Record<string, unknown>>,
  number: (name: string, fallback?: number) => number,
  fail: (what: string) => KvError,
): Rope {
  for (const name of ['mscale', 'mscale_all_dim']) {
    if (parameters[name] != null) throw fail(`rope scaling yarn with "${name}" is not served`);
  }
  const original = number('original_max_position_embeddings', maxTokens);
  const factor = number('factor', maxTokens / original);
  const scale = number('attention_factor', factor <= 1 ? 1 : 0.1 * Math.log(factor) + 1);
  const dimension = (rotations: number) =>
    (headDim * Math.log(original / (rotations * 2 * Math.PI))) / (2 * Math.log(theta));
  const truncate = parameters.truncate !== false;
  let low = dimension(number('beta_fast', 32));
  let high = dimension(number('beta_slow', 1));
  if (truncate) [low, high] = [Math.floor(low), Math.ceil(high)];
  low = Math.max(low, 0);
  high = Math.min(high, headDim - 1);
  if (low === high) high += 0.001;
  return {
    freqs: Float32Array.from(plain, (f, i) => {
      const interpolate = Math.min(1, Math.max(0, (i - low) / (high - low)));
      return (f / factor) * interpolate + f * (1 - interpolate);
    }),
    scale,
  };
}

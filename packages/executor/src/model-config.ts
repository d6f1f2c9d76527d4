/**
 * Reads a Hugging Face config.json of the Llama family and says what the forward pass is. Invariant: whatever changes
 * results and is not implemented is refused with one line; nothing is silently ignored.
 */
import { readFile } from 'node:fs/promises';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import type { ModelShape } from './executor.ts';
import { type Rope, ropeOf } from './rope.ts';

const families: Readonly<Record<string, string>> = {
  LlamaForCausalLM: 'llama',
  MistralForCausalLM: 'mistral',
  Qwen2ForCausalLM: 'qwen2',
  Qwen3ForCausalLM: 'qwen3',
};

export interface ModelConfig extends Omit<ModelShape, 'parameters'> {
  readonly rmsEps: number;
  readonly rope: Rope;
  /** Per layer, the tokens a query sees, itself included; 0 = all. */
  readonly windows: readonly number[];
  readonly tiedEmbeddings: boolean;
  readonly qkvBias: boolean;
  readonly outputBias: boolean;
  readonly qkNorm: boolean;
  /** What changes results, in one canonical form: part of the model's digest. */
  readonly canonical: string;
}

type Json = Readonly<Record<string, unknown>>;

/** Throws KvError('MODEL') for a missing or damaged file and for every architecture or option that is not served. */
export async function readModelConfig(modelDir: string): Promise<ModelConfig> {
  const file = join(modelDir, 'config.json');
  let text: string;
  try {
    text = await readFile(file, 'utf8');
  } catch (error) {
    const why = (error as NodeJS.ErrnoException).code === 'ENOENT' ? 'no such file' : (error as Error).message;
    throw new KvError('MODEL', `${file}: ${why}; give a Hugging Face model folder (config.json, *.safetensors)`);
  }
  let json: unknown;
  try {
    json = JSON.parse(text);
  } catch (error) {
    throw new KvError('MODEL', `${file}: not JSON (${(error as Error).message}); fetch the model again`);
  }
  if (typeof json !== 'object' || json === null || Array.isArray(json)) {
    throw new KvError('MODEL', `${file}: not a JSON object; fetch the model again`);
  }
  return parseModelConfig(json as Json, file);
}

/** `where` names the file in errors. */
export function parseModelConfig(json: Json, where: string): ModelConfig {
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}`);
  const count = (name: string, fallback?: number): number => {
    const value = json[name] ?? fallback;
    if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < 1 || value >= 2 ** 31) {
      throw fail(`"${name}" must be a positive integer, is ${JSON.stringify(value)}`);
    }
    return value;
  };
  const flag = (name: string, fallback: boolean): boolean => {
    const value = json[name] ?? fallback;
    if (typeof value !== 'boolean') throw fail(`"${name}" must be true or false, is ${JSON.stringify(value)}`);
    return value;
  };

  const architectures = json.architectures;
  const architecture = Array.isArray(architectures) && architectures.length === 1 ? String(architectures[0]) : '';
  const family = Object.hasOwn(families, architecture) ? families[architecture] : undefined;
  if (!family) {
    const served = Object.keys(families).join(', ');
    throw fail(`architecture ${JSON.stringify(architectures)} is not served; served are ${served}`);
  }
  const activation = json.hidden_act ?? 'silu';
  if (activation !== 'silu') throw fail(`hidden_act ${JSON.stringify(activation)} is not served; served is "silu"`);
  if (json.quantization_config != null) throw fail('quantised weights are not served; use the f32, f16 or bf16 model');
  if (flag('mlp_bias', false)) throw fail('mlp_bias is not served');
  if ((json.pretraining_tp ?? 1) !== 1) throw fail('pretraining_tp other than 1 is not served');
  if ((json.partial_rotary_factor ?? 1) !== 1) throw fail('partial_rotary_factor other than 1 is not served');

  const layers = count('num_hidden_layers');
  const hiddenSize = count('hidden_size');
  const heads = count('num_attention_heads');
  const kvHeads = count('num_key_value_heads', family === 'mistral' ? 8 : heads);
  if (json.head_dim == null && family !== 'qwen3' && hiddenSize % heads !== 0) {
    throw fail(`hidden_size ${hiddenSize} is not a multiple of num_attention_heads ${heads}`);
  }
  const headDim = count('head_dim', family === 'qwen3' ? 128 : hiddenSize / heads);
  if (heads % kvHeads !== 0) {
    throw fail(`num_attention_heads ${heads} is not a multiple of num_key_value_heads ${kvHeads}`);
  }
  if (headDim % 2 !== 0) throw fail(`head_dim ${headDim} is odd`);
  const maxModelTokens = count('max_position_embeddings', 2048);
  const rmsEps = json.rms_norm_eps ?? 1e-6;
  if (typeof rmsEps !== 'number' || !(rmsEps > 0 && rmsEps < 1)) {
    throw fail(`"rms_norm_eps" must be a small positive number, is ${JSON.stringify(rmsEps)}`);
  }

  // transformers 5 writes rope_parameters with rope_theta inside; before, rope_scaling stood beside rope_theta.
  const ropeParameters = json.rope_parameters ?? json.rope_scaling ?? null;
  if (ropeParameters !== null && (typeof ropeParameters !== 'object' || Array.isArray(ropeParameters))) {
    throw fail('"rope_parameters" must be an object');
  }
  const theta = (ropeParameters as Json | null)?.rope_theta ?? json.rope_theta ?? 10_000;
  if (typeof theta !== 'number' || !(theta > 1) || !Number.isFinite(theta)) {
    throw fail(`"rope_theta" must be a number above 1, is ${JSON.stringify(theta)}`);
  }
  if (((ropeParameters as Json | null)?.partial_rotary_factor ?? 1) !== 1) {
    throw fail('partial_rotary_factor other than 1 is not served');
  }

  const attentionBias = family !== 'qwen2' && family !== 'mistral' && flag('attention_bias', false);
  const config = {
    family,
    vocabSize: count('vocab_size'),
    hiddenSize,
    intermediateSize: count('intermediate_size'),
    layers,
    heads,
    kvHeads,
    headDim,
    maxModelTokens,
    rmsEps,
    rope: ropeOf(ropeParameters as Json | null, theta, headDim, maxModelTokens, where),
    windows: windowsOf(json, family, layers, fail),
    tiedEmbeddings: flag('tie_word_embeddings', false),
    qkvBias: family === 'qwen2' || attentionBias,
    outputBias: attentionBias,
    qkNorm: family === 'qwen3',
  };
  const canonical = JSON.stringify({
    ...config,
    // A longer or shorter permitted length changes no result.
    maxModelTokens: undefined,
    rope: { freqs: Array.from(config.rope.freqs), scale: config.rope.scale },
  });
  return { ...config, canonical };
}

/** Sliding windows per layer: Mistral's on all layers, Qwen's on those that `layer_types` or `max_window_layers` name. */
function windowsOf(json: Json, family: string, layers: number, fail: (what: string) => KvError): number[] {
  const all = new Array<number>(layers).fill(0);
  const window = json.sliding_window ?? null;
  if (family === 'llama' || window === null) return all;
  if (family !== 'mistral' && json.use_sliding_window !== true) return all;
  if (typeof window !== 'number' || !Number.isSafeInteger(window) || window < 1) {
    throw fail(`"sliding_window" must be a positive integer or null, is ${JSON.stringify(window)}`);
  }
  if (family === 'mistral') return all.fill(window);
  const types = json.layer_types ?? null;
  if (types !== null) {
    if (!Array.isArray(types) || types.length !== layers) throw fail(`"layer_types" must name all ${layers} layers`);
    return types.map((type) => {
      if (type === 'sliding_attention') return window;
      if (type === 'full_attention') return 0;
      throw fail(`layer type ${JSON.stringify(type)} is not served`);
    });
  }
  const first = json.max_window_layers ?? 28;
  if (typeof first !== 'number') throw fail('"max_window_layers" must be a number');
  return all.map((_, layer) => (layer >= first ? window : 0));
}

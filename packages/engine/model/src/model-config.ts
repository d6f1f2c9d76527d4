/**
 * Reads a Hugging Face config.json of the Llama family and says what the forward pass is. Invariant: whatever changes
 * results and is not implemented is refused with one line; nothing is silently ignored.
 */
import { KvError } from '@kvtier/errors';
import { type ModelFolder, readModelFolder } from './model-folder.ts';
import { gemmaOptions, gemmaRopes, type Json, plainRope, textConfigOf, textModels } from './model-options.ts';
import type { Rope } from './rope.ts';

/** What the model is; read from config.json and checked against the weights. */
export interface ModelShape {
  /** "llama" | "mistral" | "ministral" | "qwen2" | "qwen3" | "gemma3" */
  readonly family: string;
  readonly vocabSize: number;
  readonly hiddenSize: number;
  readonly intermediateSize: number;
  readonly layers: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly headDim: number;
  /** Of context, with what its rope stretches that by. */
  readonly maxModelTokens: number;
  readonly parameters: number;
}

const families: Readonly<Record<string, string>> = {
  LlamaForCausalLM: 'llama',
  MistralForCausalLM: 'mistral',
  MinistralForCausalLM: 'ministral',
  Qwen2ForCausalLM: 'qwen2',
  Qwen3ForCausalLM: 'qwen3',
  Gemma3ForCausalLM: 'gemma3',
};

/** Lists are made of so many before a tensor is looked at; far above any model. */
const maxLayers = 10_000;
const maxHeadDim = 65_536;

export interface ModelConfig extends Omit<ModelShape, 'parameters'> {
  readonly rmsEps: number;
  readonly rope: Rope;
  /** Per layer, the tokens a query sees, itself included; 0 = all. */
  readonly windows: readonly number[];
  readonly tiedEmbeddings: boolean;
  readonly qkvBias: boolean;
  readonly outputBias: boolean;
  readonly qkNorm: boolean;
  // Of Gemma 3 only. Absent elsewhere, so that the digests of other models stay what they are.
  /** Of layers with a window; `rope` is that of the others. */
  readonly localRope?: Rope;
  /** Added to every norm's weight; default 0. */
  readonly normOffset?: number;
  /** Multiplies q·k; default 1/sqrt(headDim). */
  readonly attentionScale?: number;
  /** Default 1. */
  readonly embeddingScale?: number;
  /** Logits are cap · tanh(x / cap); default off. */
  readonly logitCap?: number;
  /** GELU in its tanh approximation instead of SiLU. */
  readonly gelu?: boolean;
  /** What changes results, in one canonical form: part of the model's digest. */
  readonly canonical: string;
}

/** Throws KvError('MODEL') for a missing or damaged file and for every architecture or option that is not served. */
export async function readModelConfig(from: string | ModelFolder): Promise<ModelConfig> {
  if (typeof from === 'string') return readModelFolder(from, readModelConfig);
  const file = from.pathOf('config.json');
  const text = await from.text('config.json');
  if (text === null) {
    throw new KvError('MODEL', `${file}: no such file; give a Hugging Face model folder (config.json, *.safetensors)`);
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
export function parseModelConfig(whole: Json, where: string): ModelConfig {
  const json = textConfigOf(whole, where);
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}`);
  const count = (name: string, fallback?: number, most = 2 ** 31 - 1): number => {
    const value = json[name] ?? fallback;
    if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < 1) {
      throw fail(`"${name}" must be a positive integer, is ${JSON.stringify(value)}`);
    }
    if (value > most) throw fail(`"${name}" is ${value}; served are models of up to ${most}`);
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
    const served = [...Object.keys(families), ...Object.keys(textModels)].join(', ');
    throw fail(`architecture ${JSON.stringify(architectures)} is not served; served are ${served}`);
  }
  const gemma = family === 'gemma3';
  const [activationName, served] = gemma ? ['hidden_activation', 'gelu_pytorch_tanh'] : ['hidden_act', 'silu'];
  const activation = json[activationName] ?? served;
  if (activation !== served) {
    throw fail(`${activationName} ${JSON.stringify(activation)} is not served; served is "${served}"`);
  }
  if (json.quantization_config != null) throw fail('quantised weights are not served; use the f32, f16 or bf16 model');
  if (flag('mlp_bias', false)) throw fail('mlp_bias is not served');
  if ((json.pretraining_tp ?? 1) !== 1) throw fail('pretraining_tp other than 1 is not served');
  if ((json.partial_rotary_factor ?? 1) !== 1) throw fail('partial_rotary_factor other than 1 is not served');

  const layers = count('num_hidden_layers', undefined, maxLayers);
  const hiddenSize = count('hidden_size');
  const heads = count('num_attention_heads');
  const kvHeads = count('num_key_value_heads', family === 'mistral' || family === 'ministral' ? 8 : gemma ? 4 : heads);
  const headDimDefault = family === 'qwen3' ? 128 : gemma ? 256 : undefined;
  if (json.head_dim == null && headDimDefault === undefined && hiddenSize % heads !== 0) {
    throw fail(`hidden_size ${hiddenSize} is not a multiple of num_attention_heads ${heads}`);
  }
  const headDim = count('head_dim', headDimDefault ?? hiddenSize / heads, maxHeadDim);
  if (heads % kvHeads !== 0) {
    throw fail(`num_attention_heads ${heads} is not a multiple of num_key_value_heads ${kvHeads}`);
  }
  if (headDim % 2 !== 0) throw fail(`head_dim ${headDim} is odd`);
  const maxTokens = count('max_position_embeddings', gemma ? 131_072 : 2048);
  const rmsEps = json.rms_norm_eps ?? 1e-6;
  if (typeof rmsEps !== 'number' || !(rmsEps > 0 && rmsEps < 1)) {
    throw fail(`"rms_norm_eps" must be a small positive number, is ${JSON.stringify(rmsEps)}`);
  }

  const attentionBias = !['qwen2', 'mistral', 'ministral'].includes(family) && flag('attention_bias', false);
  const config = {
    family,
    vocabSize: count('vocab_size'),
    hiddenSize,
    intermediateSize: count('intermediate_size'),
    layers,
    heads,
    kvHeads,
    headDim,
    maxModelTokens: maxTokens,
    rmsEps,
    ...(gemma ? gemmaRopes(json, headDim, maxTokens, where) : plainRope(json, headDim, maxTokens, where)),
    windows: windowsOf(json, family, layers, fail),
    tiedEmbeddings: flag('tie_word_embeddings', gemma),
    qkvBias: family === 'qwen2' || attentionBias,
    outputBias: attentionBias,
    qkNorm: family === 'qwen3' || gemma,
    ...(gemma ? gemmaOptions(json, hiddenSize, fail) : {}),
  };
  const plain = ({ freqs, scale }: Rope) => ({ freqs: Array.from(freqs), scale });
  const canonical = JSON.stringify({
    ...config,
    // A longer or shorter permitted length changes no result.
    maxModelTokens: undefined,
    rope: plain(config.rope),
    ...('localRope' in config ? { localRope: plain(config.localRope) } : {}),
  });
  return { ...config, canonical };
}

/** Sliding windows per layer: those that `layer_types` or the family's older way of saying it name. */
function windowsOf(json: Json, family: string, layers: number, fail: (what: string) => KvError): number[] {
  const all = new Array<number>(layers).fill(0);
  const window = json.sliding_window ?? (family === 'gemma3' ? 4096 : null);
  if (window === null) return all;
  if (family.startsWith('qwen') && json.use_sliding_window !== true) return all;
  const types = json.layer_types ?? null;
  if (family === 'llama' && types === null) return all;
  if (typeof window !== 'number' || !Number.isSafeInteger(window) || window < 1) {
    throw fail(`"sliding_window" must be a positive integer or null, is ${JSON.stringify(window)}`);
  }
  if (types !== null) {
    if (!Array.isArray(types) || types.length !== layers) throw fail(`"layer_types" must name all ${layers} layers`);
    return types.map((type) => {
      if (type === 'sliding_attention') return window;
      if (type === 'full_attention') return 0;
      throw fail(`layer type ${JSON.stringify(type)} is not served`);
    });
  }
  if (family === 'mistral' || family === 'ministral') return all.fill(window);
  if (family === 'gemma3') {
    const pattern = json.sliding_window_pattern ?? 6;
    if (typeof pattern !== 'number' || !Number.isSafeInteger(pattern) || pattern < 1) {
      throw fail(`"sliding_window_pattern" must be a positive integer, is ${JSON.stringify(pattern)}`);
    }
    return all.map((_, layer) => ((layer + 1) % pattern === 0 ? 0 : window));
  }
  const first = json.max_window_layers ?? 28;
  if (typeof first !== 'number') throw fail('"max_window_layers" must be a number');
  return all.map((_, layer) => (layer >= first ? window : 0));
}

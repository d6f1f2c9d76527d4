/**
 * What a config.json says beyond the shape: rotary embedding as it is written by transformers 4 and 5, and what is
 * particular to Gemma 3, whose larger ones stand beside a vision tower. Invariant as in model-config.ts: what is not served is refused, never ignored.
 */
import { KvError } from '@kvtier/errors';
import { contextTokens, type Rope, ropeOf } from './rope.ts';

export type Json = Readonly<Record<string, unknown>>;

const isObject = (value: unknown): value is Json =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

/** The architectures of text and images whose text model is served alone, and what that one is. */
export const textModels: Readonly<Record<string, string>> = { Gemma3ForConditionalGeneration: 'Gemma3ForCausalLM' };
/** What transformers' Gemma3TextConfig has where a `text_config` is silent, as those of the published models are. */
const gemmaTextDefaults: Json = {
  vocab_size: 262_208,
  hidden_size: 2304,
  intermediate_size: 9216,
  num_hidden_layers: 26,
  num_attention_heads: 8,
};

/** The config of the text model of a model of text and images; other configs as they are. */
export function textConfigOf(json: Json, where: string): Json {
  const architectures = Array.isArray(json.architectures) ? json.architectures : [];
  const name = architectures.length === 1 ? String(architectures[0]) : '';
  if (!Object.hasOwn(textModels, name)) return json;
  const text = json.text_config;
  if (!isObject(text)) {
    throw new KvError('MODEL', `${where}: "text_config" must be an object for ${name}; fetch the model again`);
  }
  return {
    ...gemmaTextDefaults,
    ...text,
    architectures: [textModels[name]],
    tie_word_embeddings: json.tie_word_embeddings ?? true,
    quantization_config: json.quantization_config ?? text.quantization_config,
  };
}

/**
 * One rope for all layers: `rope_parameters` (rope_theta inside), or `rope_scaling` beside `rope_theta` as before; and the tokens of
 * context that the model serves with it. `maxTokens`: what the config says, before any scaling.
 */
export function plainRope(
  json: Json,
  headDim: number,
  maxTokens: number,
  where: string,
): { rope: Rope; maxModelTokens: number } {
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}`);
  const parameters = json.rope_parameters ?? json.rope_scaling ?? null;
  if (parameters !== null && !isObject(parameters)) throw fail('"rope_parameters" must be an object');
  const rope = checkedRope(parameters, json.rope_theta ?? 10_000, headDim, maxTokens, where);
  return { rope, maxModelTokens: contextTokens(parameters, maxTokens) };
}

/**
 * Gemma 3: `rope` of layers that see everything, `localRope` of those with a window, which is never scaled. Its config says the scaled
 * context.
 */
export function gemmaRopes(
  json: Json,
  headDim: number,
  maxTokens: number,
  where: string,
): { rope: Rope; localRope: Rope } {
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}`);
  const globalTheta = json.rope_theta ?? 1_000_000;
  const localTheta = json.rope_local_base_freq ?? 10_000;
  const both = json.rope_parameters ?? null;
  if (both === null) {
    const scaling = json.rope_scaling ?? null;
    if (scaling !== null && !isObject(scaling)) throw fail('"rope_scaling" must be an object');
    return {
      rope: checkedRope(scaling, globalTheta, headDim, maxTokens, where),
      localRope: checkedRope(null, localTheta, headDim, maxTokens, where),
    };
  }
  const of = (name: string, theta: unknown): Rope => {
    const parameters = (both as Json)[name] ?? null;
    if (!isObject(both) || (parameters !== null && !isObject(parameters))) {
      throw fail(`"rope_parameters" must hold an object "${name}"`);
    }
    return checkedRope(parameters, theta, headDim, maxTokens, where);
  };
  return { rope: of('full_attention', globalTheta), localRope: of('sliding_attention', localTheta) };
}

/** What else Gemma 3 does differently from a Llama. */
export function gemmaOptions(json: Json, hiddenSize: number, fail: (what: string) => KvError) {
  const positive = (name: string, value: unknown): number => {
    if (typeof value !== 'number' || !(value > 0) || !Number.isFinite(value)) {
      throw fail(`"${name}" must be a positive number, is ${JSON.stringify(value)}`);
    }
    return value;
  };
  if (json.use_bidirectional_attention) throw fail('use_bidirectional_attention is not served');
  // transformers reads this option and applies it nowhere: two readings, so neither is taken.
  if (json.attn_logit_softcapping != null) throw fail('attn_logit_softcapping is not served');
  const cap = json.final_logit_softcapping ?? null;
  return {
    normOffset: 1,
    attentionScale: positive('query_pre_attn_scalar', json.query_pre_attn_scalar ?? 256) ** -0.5,
    embeddingScale: Math.sqrt(hiddenSize),
    gelu: true,
    ...(cap === null ? {} : { logitCap: positive('final_logit_softcapping', cap) }),
  };
}

function checkedRope(parameters: Json | null, theta: unknown, headDim: number, maxTokens: number, where: string): Rope {
  const fail = (what: string) => new KvError('MODEL', `${where}: ${what}`);
  const base = parameters?.rope_theta ?? theta;
  if (typeof base !== 'number' || !(base > 1) || !Number.isFinite(base)) {
    throw fail(`"rope_theta" must be a number above 1, is ${JSON.stringify(base)}`);
  }
  if ((parameters?.partial_rotary_factor ?? 1) !== 1) throw fail('partial_rotary_factor other than 1 is not served');
  const rope = ropeOf(parameters, base, headDim, maxTokens, where);
  // As 32-bit numbers, as which they are computed with.
  if (![...rope.freqs, rope.scale].every((number) => Number.isFinite(Math.fround(number)))) {
    throw fail(`its rope gives frequencies that are no numbers: ${JSON.stringify(parameters)}`);
  }
  return rope;
}

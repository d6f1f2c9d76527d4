/**
 * Models of real shapes with random weights, to measure without a download: what config.json of the original says. Written in
 * bfloat16; embeddings tied, biases and rotary scaling as there. Keys and values of a token take as many bytes as there, too.
 */

/** The fields of a Hugging Face config that decide shapes and numbers. */
export interface RealShape {
  readonly architectures: readonly [string];
  readonly model_type: string;
  readonly vocab_size: number;
  readonly hidden_size: number;
  readonly intermediate_size: number;
  readonly num_hidden_layers: number;
  readonly num_attention_heads: number;
  readonly num_key_value_heads: number;
  readonly head_dim: number;
  readonly max_position_embeddings: number;
  readonly rms_norm_eps: number;
  readonly rope_theta: number;
  readonly rope_scaling: Readonly<Record<string, unknown>> | null;
  readonly tie_word_embeddings: boolean;
}

/** By what `--model random:` calls them. */
export const realShapes: Readonly<Record<string, RealShape>> = {
  // Qwen2 0.5B: queries, keys and values have biases
  '0.5b': {
    architectures: ['Qwen2ForCausalLM'],
    model_type: 'qwen2',
    vocab_size: 151_936,
    hidden_size: 896,
    intermediate_size: 4864,
    num_hidden_layers: 24,
    num_attention_heads: 14,
    num_key_value_heads: 2,
    head_dim: 64,
    max_position_embeddings: 32_768,
    rms_norm_eps: 1e-6,
    rope_theta: 1_000_000,
    rope_scaling: null,
    tie_word_embeddings: true,
  },
  // Llama 3.1 8B
  '8b': {
    architectures: ['LlamaForCausalLM'],
    model_type: 'llama',
    vocab_size: 128_256,
    hidden_size: 4096,
    intermediate_size: 14_336,
    num_hidden_layers: 32,
    num_attention_heads: 32,
    num_key_value_heads: 8,
    head_dim: 128,
    max_position_embeddings: 131_072,
    rms_norm_eps: 1e-5,
    rope_theta: 500_000,
    rope_scaling: {
      rope_type: 'llama3',
      factor: 8,
      low_freq_factor: 1,
      high_freq_factor: 4,
      original_max_position_embeddings: 8192,
    },
    tie_word_embeddings: false,
  },
};

/** What a tensor is filled with: normal deviates of this standard deviation, or one value. */
export type Fill = number | 'ones' | 'zeros';

/** Name, shape and content of a tensor. */
export type TensorPlan = readonly [name: string, shape: readonly number[], fill: Fill];

/** Every tensor, in the order of the file. */
export function realTensors(shape: RealShape): TensorPlan[] {
  const { hidden_size: hidden, intermediate_size: inner, vocab_size: vocab, head_dim: headDim } = shape;
  const [queries, keys] = [shape.num_attention_heads * headDim, shape.num_key_value_heads * headDim];
  const unit = 1 / Math.sqrt(hidden);
  // What is tied is also the last matrix: with the scale of that one, logits have clear winners.
  const out: TensorPlan[] = [['model.embed_tokens.weight', [vocab, hidden], shape.tie_word_embeddings ? 2 * unit : 1]];
  if (!shape.tie_word_embeddings) out.push(['lm_head.weight', [vocab, hidden], 2 * unit]);
  out.push(['model.norm.weight', [hidden], 'ones']);
  for (let i = 0; i < shape.num_hidden_layers; i++) {
    const at = `model.layers.${i}`;
    out.push([`${at}.input_layernorm.weight`, [hidden], 'ones']);
    out.push([`${at}.post_attention_layernorm.weight`, [hidden], 'ones']);
    for (const [name, rows] of [
      ['q', queries],
      ['k', keys],
      ['v', keys],
    ] as const) {
      out.push([`${at}.self_attn.${name}_proj.weight`, [rows, hidden], unit]);
      if (shape.model_type === 'qwen2') out.push([`${at}.self_attn.${name}_proj.bias`, [rows], 0.1]);
    }
    out.push([`${at}.self_attn.o_proj.weight`, [hidden, queries], 1 / Math.sqrt(queries)]);
    out.push([`${at}.mlp.gate_proj.weight`, [inner, hidden], unit]);
    out.push([`${at}.mlp.up_proj.weight`, [inner, hidden], unit]);
    out.push([`${at}.mlp.down_proj.weight`, [hidden, inner], 1 / Math.sqrt(inner)]);
  }
  return out;
}

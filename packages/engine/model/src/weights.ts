/**
 * Which tensors make up a model of the Llama family, checked against what the files hold. The plan that comes out names,
 * for each matrix of the forward pass, the byte ranges to stack; native code converts them to f32.
 */
import { KvError } from '@kvtier/errors';
import type { ModelConfig } from './model-config.ts';
import type { TensorTable } from './safetensors.ts';

/** Element types of weights: index into this list is the native number. */
export const dtypes = ['F32', 'F16', 'BF16'] as const;

/** Where one tensor's elements lie: `file` is an index into `WeightPlan.files`, `offset` in bytes, `count` in elements. */
export interface TensorRef {
  readonly file: number;
  readonly offset: number;
  readonly count: number;
  readonly dtype: number;
}

/** Tensors that become one matrix, stacked by rows; empty where the family has none. */
export type TensorStack = readonly TensorRef[];

export interface LayerPlan {
  readonly inputNorm: TensorStack;
  readonly qkv: TensorStack;
  readonly qkvBias: TensorStack;
  readonly qNorm: TensorStack;
  readonly kNorm: TensorStack;
  readonly o: TensorStack;
  readonly oBias: TensorStack;
  /** Over what attention adds to the residual (Gemma 3). */
  readonly attentionOutNorm: TensorStack;
  /** Before the feed-forward. */
  readonly postNorm: TensorStack;
  readonly gateUp: TensorStack;
  readonly down: TensorStack;
  /** Over what the feed-forward adds (Gemma 3). */
  readonly mlpOutNorm: TensorStack;
}

/** A file that is open for as long as native code reads it; the path is for errors. */
export interface PlanFile {
  readonly path: string;
  readonly fd: number;
}

export interface WeightPlan {
  readonly files: readonly PlanFile[];
  readonly embedding: TensorStack;
  readonly norm: TensorStack;
  /** Empty: tied to the embedding. */
  readonly lmHead: TensorStack;
  readonly layers: readonly LayerPlan[];
}

/**
 * What stands before the names of the text model, in files of text and images as published (`language_model.model.layers.0...`),
 * as transformers 5 names its modules (`model.language_model.layers.0...`), and in those of text alone.
 */
const layouts = [
  { model: 'model', head: 'lm_head' },
  { model: 'language_model.model', head: 'language_model.lm_head' },
  { model: 'model.language_model', head: 'lm_head' },
] as const;

/** Throws KvError('MODEL') naming the first tensor that is missing or has the wrong shape or dtype. */
export function planWeights(
  config: ModelConfig,
  table: TensorTable,
  modelDir: string,
): WeightPlan & { parameters: number } {
  let parameters = 0;
  const { model, head } = layouts.find(({ model }) => table.tensors.has(`${model}.embed_tokens.weight`)) ?? layouts[0];
  const ref = (name: string, ...shape: number[]): TensorRef => {
    const tensor = table.tensors.get(name);
    if (!tensor) throw new KvError('MODEL', `${modelDir}: tensor ${name} is missing; config.json and weights disagree`);
    const fail = (what: string) => new KvError('MODEL', `${table.files[tensor.file]!.path}: tensor ${name} ${what}`);
    const dtype = dtypes.indexOf(tensor.dtype as (typeof dtypes)[number]);
    if (dtype < 0) throw fail(`has dtype ${tensor.dtype}; served are ${dtypes.join(', ')}`);
    if (tensor.shape.length !== shape.length || tensor.shape.some((size, i) => size !== shape[i])) {
      throw fail(`has shape [${tensor.shape}], config.json says [${shape}]`);
    }
    const count = shape.reduce((product, size) => product * size, 1);
    parameters += count;
    return { file: tensor.file, offset: tensor.offset, count, dtype };
  };

  const { hiddenSize: hidden, intermediateSize: inner, headDim } = config;
  const queries = config.heads * headDim;
  const keys = config.kvHeads * headDim;
  const layers = Array.from({ length: config.layers }, (_, i): LayerPlan => {
    const at = `${model}.layers.${i}`;
    // Gemma 3 calls "post attention" the norm over what attention adds; elsewhere it is the one before the feed-forward.
    const gemma = config.family === 'gemma3';
    const attention = `${at}.self_attn`;
    return {
      inputNorm: [ref(`${at}.input_layernorm.weight`, hidden)],
      qkv: [
        ref(`${attention}.q_proj.weight`, queries, hidden),
        ref(`${attention}.k_proj.weight`, keys, hidden),
        ref(`${attention}.v_proj.weight`, keys, hidden),
      ],
      qkvBias: config.qkvBias
        ? [
            ref(`${attention}.q_proj.bias`, queries),
            ref(`${attention}.k_proj.bias`, keys),
            ref(`${attention}.v_proj.bias`, keys),
          ]
        : [],
      qNorm: config.qkNorm ? [ref(`${attention}.q_norm.weight`, headDim)] : [],
      kNorm: config.qkNorm ? [ref(`${attention}.k_norm.weight`, headDim)] : [],
      o: [ref(`${attention}.o_proj.weight`, hidden, queries)],
      oBias: config.outputBias ? [ref(`${attention}.o_proj.bias`, hidden)] : [],
      attentionOutNorm: gemma ? [ref(`${at}.post_attention_layernorm.weight`, hidden)] : [],
      postNorm: [ref(`${at}.${gemma ? 'pre_feedforward' : 'post_attention'}_layernorm.weight`, hidden)],
      gateUp: [ref(`${at}.mlp.gate_proj.weight`, inner, hidden), ref(`${at}.mlp.up_proj.weight`, inner, hidden)],
      down: [ref(`${at}.mlp.down_proj.weight`, hidden, inner)],
      mlpOutNorm: gemma ? [ref(`${at}.post_feedforward_layernorm.weight`, hidden)] : [],
    };
  });
  const embedding = [ref(`${model}.embed_tokens.weight`, config.vocabSize, hidden)];
  const norm = [ref(`${model}.norm.weight`, hidden)];
  const lmHead = config.tiedEmbeddings ? [] : [ref(`${head}.weight`, config.vocabSize, hidden)];
  return { files: table.files, embedding, norm, lmHead, layers, parameters };
}

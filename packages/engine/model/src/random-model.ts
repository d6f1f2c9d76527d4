/**
 * A Llama, or a model of window layers, of a given size with seeded random weights, as ordinary Hugging Face files: for measuring, where speed matters
 * and answers do not. The same size gives the same bytes on every machine. Scales are chosen so that attention is neither
 * flat nor one-hot and logits have clear winners: a wrong KV block shows as a different greedy token.
 */
import {
  copyFile,
  type FileHandle,
  mkdir,
  mkdtemp,
  open,
  readFile,
  rename,
  rm,
  statfs,
  writeFile,
} from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { DeviatePool, writeTensor } from './random-fill.ts';
import { type Fill, type RealShape, realTensors, type TensorPlan } from './real-shapes.ts';

export interface RandomShape {
  readonly hiddenSize: number;
  readonly layers: number;
  readonly heads: number;
  readonly kvHeads: number;
  readonly intermediateSize: number;
}

/** What a random model is like: a Llama, or one whose layers see only a window, all of them or some. */
export type RandomFamily = 'llama' | 'mistral-sw' | 'ministral' | 'gemma3';

/** Per family: layers in a turn that have a window, and those that see everything. */
const turns: Readonly<Record<RandomFamily, { readonly local: number; readonly global: number }>> = {
  llama: { local: 0, global: 1 },
  'mistral-sw': { local: 1, global: 0 },
  ministral: { local: 1, global: 1 },
  gemma3: { local: 2, global: 1 },
};
const windowTokens = 128;
const headDim = 64;
/** In the config, so that a later generator does not take an older one's files for its own. */
const generatorVersion = 2;
/** Beside the model, so that the disk is not full to the last byte. */
const spareBytes = 64 * 2 ** 20;
const tokenizerFiles = ['tokenizer.json', 'tokenizer_config.json', 'special_tokens_map.json', 'generation_config.json'];

/** The shape nearest to `parameters`, embeddings included: depth and width grow together, GQA with two heads per group. */
export function randomShape(parameters: number, vocabSize: number, family: RandomFamily = 'llama'): RandomShape {
  // A layer has about (3 x 2.75 + 3) hidden^2 parameters; with hidden = 64 x layers that is 46,080 layers^3.
  const depth = Math.cbrt(parameters / 46_080);
  const hiddenSize = Math.max(128, 128 * Math.round((64 * depth) / 128));
  const intermediateSize = 64 * Math.round((2.75 * hiddenSize) / 64);
  const perLayer = 3 * hiddenSize * intermediateSize + 3 * hiddenSize * hiddenSize;
  const turn = turns[family].local + turns[family].global;
  const layers = turn * Math.max(1, Math.round((parameters - 2 * vocabSize * hiddenSize) / perLayer / turn));
  const heads = hiddenSize / headDim;
  return { hiddenSize, layers, heads, kvHeads: heads / 2, intermediateSize };
}

/** Name, shape and content of every tensor, in the order of the file. */
function tensorsOf(shape: RandomShape, vocabSize: number, family: RandomFamily): TensorPlan[] {
  const { hiddenSize: hidden, intermediateSize: inner, heads, kvHeads } = shape;
  const unit = 1 / Math.sqrt(hidden);
  const gemma = family === 'gemma3';
  const norm = gemma ? 'zeros' : 'ones'; // Gemma keeps the distance from one, and scales embeddings up by sqrt(hidden)
  const out: TensorPlan[] = [
    ['model.embed_tokens.weight', [vocabSize, hidden], gemma ? unit : 1],
    ['lm_head.weight', [vocabSize, hidden], 2 * unit],
    ['model.norm.weight', [hidden], norm],
  ];
  for (let i = 0; i < shape.layers; i++) {
    const at = `model.layers.${i}`;
    out.push([`${at}.input_layernorm.weight`, [hidden], norm]);
    out.push([`${at}.post_attention_layernorm.weight`, [hidden], norm]);
    if (gemma) {
      for (const name of ['pre_feedforward', 'post_feedforward'])
        out.push([`${at}.${name}_layernorm.weight`, [hidden], norm]);
      for (const name of ['q_norm', 'k_norm']) out.push([`${at}.self_attn.${name}.weight`, [headDim], norm]);
    }
    out.push([`${at}.self_attn.q_proj.weight`, [heads * headDim, hidden], unit]);
    out.push([`${at}.self_attn.k_proj.weight`, [kvHeads * headDim, hidden], unit]);
    out.push([`${at}.self_attn.v_proj.weight`, [kvHeads * headDim, hidden], unit]);
    out.push([`${at}.self_attn.o_proj.weight`, [hidden, heads * headDim], unit]);
    out.push([`${at}.mlp.gate_proj.weight`, [inner, hidden], unit]);
    out.push([`${at}.mlp.up_proj.weight`, [inner, hidden], unit]);
    out.push([`${at}.mlp.down_proj.weight`, [hidden, inner], 1 / Math.sqrt(inner)]);
  }
  return out;
}

/**
 * Makes `modelDir` unless it is there already; whole or not at all (temporary folder, then rename).
 * `tokenizerDir`: the folder whose tokenizer the model borrows. `onProgress`: share done, 0..1.
 */
export async function makeRandomModel(
  modelDir: string,
  parameters: number,
  tokenizerDir: string,
  onProgress: (share: number) => void = () => {},
  family: RandomFamily = 'llama',
): Promise<void> {
  await makeFolder(modelDir, (folder) => writeModel(folder, parameters, tokenizerDir, onProgress, family));
}

/** The same of a real model's shape, as fast as the disk takes it. @throws KvError MODEL, too, where it has no room for it */
export async function makeRealModel(
  modelDir: string,
  shape: RealShape,
  tokenizerDir: string,
  onProgress: (share: number) => void = () => {},
): Promise<void> {
  await makeFolder(modelDir, async (folder) => {
    const tensors = realTensors(shape);
    const total = tensors.reduce((sum, [, size]) => sum + countOf(size), 0);
    await requireRoom(folder, modelDir, 2 * total);
    const source = await copyTokenizer(tokenizerDir, folder);
    const pool = await DeviatePool.make(total);
    await writeTensors(folder, tensors, onProgress, (file, count, fill) => pool.write(file, count, fill));
    await writeConfig(folder, { ...shape, hidden_act: 'silu', ...endTokens(source) });
  });
}

async function requireRoom(folder: string, modelDir: string, bytes: number): Promise<void> {
  const { bavail, bsize } = await statfs(folder);
  const room = bavail * bsize;
  if (room >= bytes + spareBytes) return;
  const gib = (count: number): string => `${(count / 2 ** 30).toFixed(1)} GiB`;
  throw new KvError(
    'MODEL',
    `${modelDir}: the model takes ${gib(bytes)}, the disk has ${gib(room)} left; make room or set XDG_CACHE_HOME to a larger one`,
  );
}

async function makeFolder(modelDir: string, write: (folder: string) => Promise<void>): Promise<void> {
  if (await isOurs(modelDir)) return;
  let temporary = '';
  try {
    await mkdir(dirname(modelDir), { recursive: true });
    temporary = await mkdtemp(`${modelDir}.tmp-`);
    await write(temporary);
    await publish(temporary, modelDir);
  } catch (error) {
    if (error instanceof KvError) throw error;
    throw new KvError('MODEL', `${modelDir}: the random model cannot be written (${(error as Error).message})`);
  } finally {
    if (temporary) await rm(temporary, { recursive: true, force: true });
  }
}

/** A folder cannot be renamed onto a full one: whoever is first wins, and only files of another generator are removed. */
async function publish(temporary: string, modelDir: string): Promise<void> {
  try {
    await rename(temporary, modelDir);
  } catch (error) {
    if (await isOurs(modelDir)) return;
    const { code } = error as NodeJS.ErrnoException;
    if (code !== 'ENOTEMPTY' && code !== 'EEXIST') throw error;
    await rm(modelDir, { recursive: true, force: true });
    await rename(temporary, modelDir);
  }
}

async function isOurs(modelDir: string): Promise<boolean> {
  try {
    const config = JSON.parse(await readFile(join(modelDir, 'config.json'), 'utf8')) as Record<string, unknown>;
    return config.kvtier_generator === generatorVersion;
  } catch {
    return false;
  }
}

async function writeModel(
  folder: string,
  parameters: number,
  tokenizerDir: string,
  onProgress: (share: number) => void,
  family: RandomFamily,
): Promise<void> {
  const source = await copyTokenizer(tokenizerDir, folder);
  const vocabSize = 64 * Math.ceil(source.vocab_size! / 64);
  const shape = randomShape(parameters, vocabSize, family);
  const config = {
    ...familyConfig(family, shape.layers),
    vocab_size: vocabSize,
    hidden_size: shape.hiddenSize,
    intermediate_size: shape.intermediateSize,
    num_hidden_layers: shape.layers,
    num_attention_heads: shape.heads,
    num_key_value_heads: shape.kvHeads,
    head_dim: headDim,
    rms_norm_eps: 1e-5,
    max_position_embeddings: 16_384,
    tie_word_embeddings: false,
    ...endTokens(source),
  };

  let seed = 0;
  await writeTensors(folder, tensorsOf(shape, vocabSize, family), onProgress, (file, count, fill) =>
    writeTensor(file, count, fill, ++seed),
  );
  await writeConfig(folder, config);
}

/** Returns what is said there of the model that the tokenizer belongs to. */
async function copyTokenizer(tokenizerDir: string, folder: string): Promise<Record<string, number>> {
  for (const name of tokenizerFiles) await copyFile(join(tokenizerDir, name), join(folder, name));
  return JSON.parse(await readFile(join(tokenizerDir, 'config.json'), 'utf8')) as Record<string, number>;
}

const endTokens = ({ bos_token_id, eos_token_id, pad_token_id }: Record<string, number>): object => ({
  bos_token_id,
  eos_token_id,
  pad_token_id,
});

/** Last of all: a folder with it is whole. */
const writeConfig = (folder: string, config: object): Promise<void> =>
  writeFile(
    join(folder, 'config.json'),
    `${JSON.stringify({ ...config, torch_dtype: 'bfloat16', kvtier_generator: generatorVersion }, null, 2)}\n`,
  );

const countOf = (size: readonly number[]): number => size.reduce((product, n) => product * n, 1);

async function writeTensors(
  folder: string,
  tensors: readonly TensorPlan[],
  onProgress: (share: number) => void,
  write: (file: FileHandle, count: number, fill: Fill) => Promise<void>,
): Promise<void> {
  const header: Record<string, unknown> = {};
  let offset = 0;
  for (const [name, size] of tensors) {
    const bytes = 2 * countOf(size);
    header[name] = { dtype: 'BF16', shape: size, data_offsets: [offset, offset + bytes] };
    offset += bytes;
  }
  let json = JSON.stringify(header);
  json += ' '.repeat((8 - (json.length % 8)) % 8);
  const prefix = Buffer.alloc(8);
  prefix.writeBigUInt64LE(BigInt(json.length));

  const file = await open(join(folder, 'model.safetensors'), 'wx');
  try {
    await file.write(Buffer.concat([prefix, Buffer.from(json)]));
    let done = 0;
    for (const [, size, fill] of tensors) {
      const count = countOf(size);
      await write(file, count, fill);
      done += 2 * count;
      onProgress(done / offset);
    }
    await file.sync();
  } finally {
    await file.close();
  }
}

/** What config.json says of the family. */
function familyConfig(family: RandomFamily, layers: number): Record<string, unknown> {
  const llama = { architectures: ['LlamaForCausalLM'], model_type: 'llama', hidden_act: 'silu', rope_theta: 1_000_000 };
  const { local, global } = turns[family];
  const layer_types = Array.from({ length: layers }, (_, layer) =>
    layer % (local + global) < local ? 'sliding_attention' : 'full_attention',
  );
  const sliding_window = windowTokens;
  switch (family) {
    case 'llama':
      return llama;
    case 'mistral-sw':
      return { ...llama, architectures: ['MistralForCausalLM'], model_type: 'mistral', sliding_window };
    case 'ministral':
      return {
        ...llama,
        architectures: ['MinistralForCausalLM'],
        model_type: 'ministral',
        sliding_window,
        layer_types,
      };
    case 'gemma3':
      return {
        architectures: ['Gemma3ForCausalLM'],
        model_type: 'gemma3_text',
        hidden_activation: 'gelu_pytorch_tanh',
        rope_theta: 1_000_000,
        rope_local_base_freq: 10_000,
        query_pre_attn_scalar: headDim / 4, // heads are normed: with headDim attention would be nearly flat
        sliding_window,
        layer_types,
      };
  }
}

/** Bad model folders: each is one KvError('MODEL') of one line that names the file, and never a crash. */
import { truncateSync, writeFileSync } from 'node:fs';
import { cp, mkdtemp, readFile, rm, truncate, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { readTensorTable } from '@kvtier/model';
import { parseModelConfig } from '@kvtier/model/testing';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { createExecutor } from './index.ts';
import { changeHeader } from './testing/change-header.ts';

const golden = fileURLToPath(new URL('../../../../test/numerics/golden', import.meta.url));
let dir: string;
beforeEach(async () => {
  dir = await mkdtemp(join(tmpdir(), 'kvtier-model-'));
});
afterEach(() => rm(dir, { recursive: true, force: true }));

/** What a config of a small model says besides its architecture and its rope. */
const small = { vocab_size: 8, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4 };
const llama3 = { factor: 8, low_freq_factor: 1, high_freq_factor: 4 };

const copy = (name = 'llama') => cp(join(golden, name), dir, { recursive: true });

async function refused(pattern: RegExp): Promise<void> {
  const opening = createExecutor({
    modelDir: dir,
    blockTokens: 16,
    blockCount: 8,
    maxStepTokens: 16,
    maxStepSequences: 1,
  });
  const error = await opening.then(
    () => null,
    (thrown: unknown) => thrown,
  );
  expect(error).toBeInstanceOf(KvError);
  const { code, message } = error as KvError;
  expect(code).toBe('MODEL');
  expect(message).toMatch(pattern);
  expect(message).toContain(dir);
  expect(message).not.toContain('\n');
}

const weights = () => join(dir, 'model.safetensors');

const key = 'model.layers.1.mlp.up_proj.weight';

describe('config.json', () => {
  const change = async (changes: Record<string, unknown>) => {
    const config = JSON.parse(await readFile(join(golden, 'llama/config.json'), 'utf8')) as object;
    await copy();
    await writeFile(join(dir, 'config.json'), JSON.stringify({ ...config, ...changes }));
  };

  it('missing, not JSON, not an object', async () => {
    await refused(/no such file/);
    await writeFile(join(dir, 'config.json'), '{"hidden_size": 6');
    await refused(/not JSON/);
    await writeFile(join(dir, 'config.json'), '[]');
    await refused(/not a JSON object/);
  });

  it.each<[Record<string, unknown>, RegExp]>([
    [{ architectures: ['GPT2LMHeadModel'] }, /GPT2LMHeadModel.*not served; served are LlamaForCausalLM/],
    [{ architectures: undefined }, /architecture undefined is not served/],
    [{ hidden_size: '64' }, /"hidden_size" must be a positive integer, is "64"/],
    [{ num_hidden_layers: 0 }, /"num_hidden_layers"/],
    [{ num_attention_heads: 3, head_dim: null }, /not a multiple of num_attention_heads/],
    [{ num_key_value_heads: 3 }, /not a multiple of num_key_value_heads/],
    [{ head_dim: 15 }, /odd/],
    [{ hidden_act: 'gelu' }, /hidden_act "gelu"/],
    [{ mlp_bias: true }, /mlp_bias/],
    [{ rms_norm_eps: 'x' }, /rms_norm_eps/],
    [{ quantization_config: { bits: 4 } }, /quantised/],
    [{ rope_parameters: { rope_type: 'dynamic', factor: 2 } }, /"dynamic" is not served/],
    [{ rope_parameters: { rope_type: 'llama3', factor: 8 } }, /low_freq_factor/],
    [{ rope_parameters: null, rope_theta: -1 }, /rope_theta/],
    [{ num_hidden_layers: 3 }, /model\.layers\.2.* is missing/],
    [{ intermediate_size: 97 }, /gate_proj.* has shape \[96,64\], config.json says \[97,64\]/],
    [{ attention_bias: true }, /q_proj\.bias is missing/],
  ])('%o', async (changes, pattern) => {
    await change(changes);
    await refused(pattern);
  });

  it('any values are a configuration or one line, and neither takes time or memory', () => {
    const value = fc.oneof(
      fc.constantFrom<unknown>(0, -1, 0.5, 2 ** 31 - 1, 2 ** 31, 2 ** 53, 1e308, '', [], {}, true, null, undefined),
      fc.integer(),
      fc.double({ noNaN: true }),
      fc.string({ maxLength: 4 }),
    );
    const names = ['num_hidden_layers', 'hidden_size', 'num_attention_heads', 'num_key_value_heads', 'head_dim'];
    names.push('intermediate_size', 'vocab_size', 'max_position_embeddings', 'sliding_window', 'max_window_layers');
    names.push('rms_norm_eps', 'rope_theta', 'rope_scaling', 'layer_types', 'sliding_window_pattern');
    names.push('query_pre_attn_scalar', 'final_logit_softcapping', 'original_max_position_embeddings');
    const base = {
      ...{ vocab_size: 8, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4 },
      ...{ use_sliding_window: true, sliding_window: 16 },
    };
    const scaling = fc.record({
      rope_type: fc.constantFrom('linear', 'llama3', 'yarn', 'longrope', 'dynamic'),
      factor: value,
      low_freq_factor: value,
      high_freq_factor: value,
      original_max_position_embeddings: value,
      beta_fast: value,
      beta_slow: value,
      attention_factor: value,
    });
    fc.assert(
      fc.property(
        fc.constantFrom('LlamaForCausalLM', 'Qwen2ForCausalLM', 'Gemma3ForCausalLM', 'MistralForCausalLM'),
        fc.dictionary(fc.constantFrom(...names), value, { maxKeys: 3 }),
        fc.option(scaling),
        (architecture, changes, rope_scaling) => {
          const json = { architectures: [architecture], ...base, ...(rope_scaling && { rope_scaling }), ...changes };
          const started = performance.now();
          try {
            const config = parseModelConfig(json, 'config.json');
            expect(config.windows).toHaveLength(config.layers);
            expect(config.rope.freqs).toHaveLength(config.headDim / 2);
            expect(Number.isInteger(config.maxModelTokens) && config.maxModelTokens > 0).toBe(true);
            expect(config.maxModelTokens).toBeLessThan(2 ** 31);
            for (const freq of config.rope.freqs) expect(Number.isFinite(freq)).toBe(true);
            expect(Number.isFinite(config.rope.scale)).toBe(true);
          } catch (error) {
            expect(error).toMatchObject({ code: 'MODEL', message: expect.not.stringContaining('\n') as string });
          }
          expect(performance.now() - started).toBeLessThan(5_000);
        },
      ),
      { numRuns: 1_000 },
    );
  });

  it.each([
    ['no scaling', 32_768, null, 32_768],
    ['yarn', 32_768, { type: 'yarn', factor: 4.0, original_max_position_embeddings: 32_768 }, 131_072],
    [
      'yarn, said in full',
      131_072,
      { rope_type: 'yarn', factor: 4, original_max_position_embeddings: 32_768 },
      131_072,
    ],
    [
      'yarn that says less',
      262_144,
      { rope_type: 'yarn', factor: 4, original_max_position_embeddings: 32_768 },
      262_144,
    ],
    ['yarn without its original length', 32_768, { rope_type: 'yarn', factor: 2.5 }, 81_920],
    ['yarn without a factor', 131_072, { rope_type: 'yarn', original_max_position_embeddings: 32_768 }, 131_072],
    ['linear', 16_384, { type: 'linear', factor: 4 }, 65_536],
    ['linear beyond what can be counted', 16_384, { type: 'linear', factor: 1e9 }, 2 ** 31 - 1],
    ['llama3', 131_072, { type: 'llama3', ...llama3, original_max_position_embeddings: 8192 }, 131_072],
  ])('the context is what rope stretches it to: %s', (_what, max_position_embeddings, rope_scaling, tokens) => {
    const of = (architecture: string, most?: number) =>
      parseModelConfig(
        { architectures: [architecture], ...small, rope_scaling, ...(most && { max_position_embeddings: most }) },
        'config.json',
      );
    expect(of('Qwen2ForCausalLM', max_position_embeddings).maxModelTokens).toBe(tokens);
    // Gemma's says the scaled one.
    expect(of('Gemma3ForCausalLM', max_position_embeddings).maxModelTokens).toBe(max_position_embeddings);
  });

  it('a longer context is the same model: its rope, and with that its digest, are as without it', () => {
    const of = (max_position_embeddings: number, scaling: Record<string, unknown>) =>
      parseModelConfig(
        {
          architectures: ['Qwen2ForCausalLM'],
          ...small,
          max_position_embeddings,
          rope_scaling: { type: 'yarn', ...scaling },
        },
        'config.json',
      );
    const original = { factor: 4, original_max_position_embeddings: 32_768 };
    const [said, stretched, fallback] = [of(131_072, original), of(32_768, original), of(32_768, { factor: 4 })];
    expect([said, stretched, fallback].map(({ maxModelTokens }) => maxModelTokens)).toEqual(Array(3).fill(131_072));
    expect(stretched).toEqual(said);
    expect(fallback).toEqual(said);
  });

  it('reads old and new spellings of rope alike', () => {
    const base = { architectures: ['LlamaForCausalLM'], ...small };
    const scaling = { ...llama3, original_max_position_embeddings: 64 };
    const rope_theta = 500_000;
    const old = parseModelConfig({ ...base, rope_theta, rope_scaling: { type: 'llama3', ...scaling } }, 'old');
    const now = parseModelConfig({ ...base, rope_parameters: { rope_type: 'llama3', rope_theta, ...scaling } }, 'new');
    expect(old).toEqual(now);
    const plain = parseModelConfig({ ...base, rope_theta }, 'plain');
    expect(now.rope.freqs[0]).toBe(plain.rope.freqs[0]);
    expect(now.rope.freqs.at(-1)).toBeCloseTo(plain.rope.freqs.at(-1)! / 8, 12);
  });
});

describe('safetensors', () => {
  it('missing file, missing shard, shard outside the folder, tensor that the index promises', async () => {
    await copy();
    await rm(weights());
    await refused(/model\.safetensors: no such file/);
    await rm(dir, { recursive: true });
    await copy('qwen2');
    const index = join(dir, 'model.safetensors.index.json');
    const json = JSON.parse(await readFile(index, 'utf8')) as { weight_map: Record<string, string> };
    await writeFile(
      index,
      JSON.stringify({ weight_map: { ...json.weight_map, extra: 'model-00001-of-00004.safetensors' } }),
    );
    await refused(/tensor extra is missing/);
    await writeFile(index, JSON.stringify({ weight_map: { ...json.weight_map, extra: '../../x.safetensors' } }));
    await refused(/not a file name/);
    await writeFile(index, '{}');
    await refused(/weight_map/);
    await writeFile(index, JSON.stringify(json));
    await rm(join(dir, 'model-00002-of-00004.safetensors'));
    await refused(/model-00002-of-00004\.safetensors: no such file/);
  });

  it('truncated anywhere', async () => {
    await copy();
    const { length } = await readFile(weights());
    for (const bytes of [length - 1, length / 2, 1000, 100, 9]) {
      await truncate(weights(), Math.floor(bytes));
      await refused(/damaged/);
    }
    await writeFile(weights(), '');
    await refused(/too few/);
  });

  it.each<[string, (header: Record<string, Record<string, unknown>>) => unknown, RegExp]>([
    ['not JSON', () => '{"a":', /not JSON/],
    ['not an object', () => '[1, 2]', /not a JSON object/],
    [
      'unknown dtype',
      (h) => {
        h[key]!.dtype = 'F12';
      },
      /unknown dtype "F12"/,
    ],
    [
      'no shape',
      (h) => {
        delete h[key]!.shape;
      },
      /no proper shape/,
    ],
    [
      'negative size',
      (h) => {
        h[key]!.shape = [-96, -64];
      },
      /no proper shape/,
    ],
    [
      'no offsets',
      (h) => {
        delete h[key]!.data_offsets;
      },
      /no proper data_offsets/,
    ],
    [
      'entry is null',
      (h) => {
        (h as Record<string, unknown>)[key] = null;
      },
      /unknown dtype/,
    ],
    [
      'too few bytes',
      (h) => {
        (h[key]!.data_offsets as number[])[1]! -= 4;
      },
      /its shape and dtype need/,
    ],
    [
      'past the end',
      (h) => {
        h[key]!.data_offsets = [10_000_000, 10_000_000 + 96 * 64 * 4];
      },
      /ends at byte/,
    ],
    [
      'overlap',
      (h) => {
        h[key]!.data_offsets = h['model.layers.0.mlp.up_proj.weight']!.data_offsets;
      },
      /overlap/,
    ],
    [
      'missing tensor',
      (h) => {
        delete h[key];
      },
      /up_proj\.weight is missing/,
    ],
    [
      'other shape',
      (h) => {
        h[key]!.shape = [64, 96];
      },
      /has shape \[64,96\], config.json says \[96,64\]/,
    ],
    [
      'integers',
      (h) => {
        h[key]!.dtype = 'I32';
      },
      /dtype I32; served are F32, F16, BF16/,
    ],
  ])('%s', async (_name, change, pattern) => {
    await copy();
    await changeHeader(weights(), change);
    await refused(pattern);
  });

  it('any bytes as a file are refused or describe bytes that exist', async () => {
    await copy();
    const original = await readFile(weights());
    const edits = fc.array(fc.tuple(fc.nat(2500), fc.nat(255)), { minLength: 1, maxLength: 4 });
    await fc.assert(
      fc.asyncProperty(edits, async (changes) => {
        const bytes = Buffer.from(original);
        for (const [at, value] of changes) bytes[at] = value;
        await writeFile(weights(), bytes);
        const table = await readTensorTable(dir).catch((error: unknown) => {
          expect(error).toMatchObject({ code: 'MODEL' });
          return null;
        });
        for (const tensor of table?.tensors.values() ?? []) {
          expect(tensor.offset + tensor.bytes).toBeLessThanOrEqual(bytes.length);
        }
      }),
      { numRuns: 60 },
    );
  });

  it('a folder that changes while it is read is refused, and nothing of it is opened', async () => {
    await copy();
    const options = { modelDir: dir, blockTokens: 16, blockCount: 8, maxStepTokens: 16, maxStepSequences: 1 };
    const changes: Record<string, () => void> = {
      'model.safetensors': () => truncateSync(weights(), 4096), // under native code's eyes
      'tokenizer.json': () => writeFileSync(join(dir, 'tokenizer.json'), '{}'),
    };
    for (const [name, alongside] of Object.entries(changes)) {
      await expect(createExecutor({ ...options, alongside })).rejects.toMatchObject({
        code: 'MODEL',
        message: `${join(dir, name)}: changed while it was loaded; start again`,
      });
      await copy();
    }
  });

  it('weights that are not numbers draw nothing, and harm no process', async () => {
    await copy();
    const bytes = await readFile(weights());
    bytes.fill(0xff, bytes.length - 64); // the last tensor's end becomes NaN
    await writeFile(weights(), bytes);
    const options = { modelDir: dir, blockTokens: 16, blockCount: 8, maxStepTokens: 16, maxStepSequences: 1 };
    const executor = await createExecutor(options);
    const { runStep } = await import('./testing/run-step.ts');
    expect([...(await runStep(executor, [{ blocks: [1], computed: 0, tokens: [5, 6] }])).tokenIds]).toEqual([-1]);
    await executor.close();
  });

  it('a token whose embedding is no number spoils its own sequence, and nobody else in the step or in its blocks', async () => {
    const { spoilToken, expectOnlyItsOwnHarm } = await import('./testing/spoiled-token.ts');
    await copy();
    await spoilToken(dir, 7);
    const executor = await createExecutor({
      modelDir: dir,
      blockTokens: 16,
      blockCount: 8,
      maxStepTokens: 64,
      maxStepSequences: 2,
    });
    await expectOnlyItsOwnHarm(executor, 7);
    await executor.close();
  });
});

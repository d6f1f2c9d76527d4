/** The text model of a model of text and images: its config, and its weights under every name that they have in files. */
import { cp, mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { parseModelConfig } from '@kvtier/model/testing';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { createExecutor } from './index.ts';
import { changeHeader } from './testing/change-header.ts';
import { goldenDir, readGolden } from './testing/golden.ts';
import { prefill, relativeError } from './testing/run-step.ts';

let dir: string;
beforeEach(async () => {
  dir = await mkdtemp(join(tmpdir(), 'kvtier-vision-'));
});
afterEach(() => rm(dir, { recursive: true, force: true }));

/** What the config.json of Gemma 3 4B says of its text model; the rest are defaults of transformers. */
const gemma4b = {
  architectures: ['Gemma3ForConditionalGeneration'],
  model_type: 'gemma3',
  text_config: {
    hidden_size: 2560,
    intermediate_size: 10_240,
    model_type: 'gemma3_text',
    num_hidden_layers: 34,
    rope_scaling: { factor: 8, rope_type: 'linear' },
    sliding_window: 1024,
  },
  vision_config: { hidden_size: 1152, model_type: 'siglip_vision_model' },
};

it('is described by text_config and by what transformers has where that is silent', () => {
  const { rope, localRope, windows, canonical, ...config } = parseModelConfig(gemma4b, 'gemma');
  expect(config).toEqual({
    family: 'gemma3',
    vocabSize: 262_208,
    hiddenSize: 2560,
    intermediateSize: 10_240,
    layers: 34,
    heads: 8,
    kvHeads: 4,
    headDim: 256,
    maxModelTokens: 131_072,
    rmsEps: 1e-6,
    tiedEmbeddings: true,
    qkvBias: false,
    outputBias: false,
    qkNorm: true,
    normOffset: 1,
    attentionScale: 1 / 16,
    embeddingScale: Math.sqrt(2560),
    gelu: true,
  });
  expect(windows).toEqual(Array.from({ length: 34 }, (_, layer) => (layer % 6 === 5 ? 0 : 1024)));
  expect(rope.freqs[1]! * 8).toBeCloseTo(1e6 ** (-2 / 256), 6);
  expect(localRope!.freqs[1]).toBeCloseTo(1e4 ** (-2 / 256), 6);
  const alone = { ...gemma4b.text_config, vocab_size: 262_208, num_attention_heads: 8 };
  expect(parseModelConfig({ ...alone, architectures: ['Gemma3ForCausalLM'] }, 'text').canonical).toBe(canonical);
});

it.each<[Record<string, unknown>, RegExp]>([
  [{ text_config: undefined }, /^here: "text_config" must be an object for Gemma3ForConditionalGeneration/],
  [{ quantization_config: { bits: 4 } }, /^here: quantised weights/],
  [{ text_config: { ...gemma4b.text_config, quantization_config: { bits: 4 } } }, /^here: quantised weights/],
  [{ architectures: ['LlavaForConditionalGeneration'] }, /is not served; served are .*Gemma3ForConditionalGeneration$/],
])('%o is refused', (changes, message) => {
  expect(() => parseModelConfig({ ...gemma4b, ...changes }, 'here')).toThrow(message);
});

const published = /^language_model\.model\./;

it.each([
  ['as published', 'language_model.model.'],
  ['as modules of transformers 5', 'model.language_model.'],
  ['of text alone', 'model.'],
])('finds its weights %s', async (_, prefix) => {
  await cp(goldenDir('gemma3-vision'), dir, { recursive: true });
  await changeHeader(join(dir, 'model.safetensors'), (header) =>
    Object.fromEntries(Object.entries(header).map(([name, tensor]) => [name.replace(published, prefix), tensor])),
  );
  const { tokens, positions, logits } = readGolden('gemma3-vision');
  const options = { blockTokens: 16, blockCount: 64, maxStepTokens: 128, maxStepSequences: 1, threads: 1 };
  const executor = await createExecutor({ modelDir: dir, ...options });
  try {
    const [row] = await prefill(executor, tokens, [tokens.length]);
    expect(relativeError(row!, logits[positions.indexOf(tokens.length - 1)]!)).toBeLessThan(1e-3);
  } finally {
    await executor.close();
  }
});

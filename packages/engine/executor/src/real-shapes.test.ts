/** Random models of real shapes: the originals' counts, and small ones of the same kind that run. */
import { createHash } from 'node:crypto';
import { mkdtemp, readdir, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { readModelConfig } from '@kvtier/model';
import { makeRealModel, type RealShape, realShapes, realTensors } from '@kvtier/model/testing';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { createExecutor } from './index.ts';
import { relativeError, runStep } from './testing/run-step.ts';

const tokenizerDir = fileURLToPath(new URL('../../../../models/demo/model', import.meta.url));
let folder: string;
beforeEach(async () => {
  folder = await mkdtemp(join(tmpdir(), 'kvtier-real-'));
});
afterEach(() => rm(folder, { recursive: true, force: true }));

it.each([
  ['0.5b', 494_032_768],
  ['8b', 8_030_261_248],
])('%s has %i parameters', (name, parameters) => {
  const counts = realTensors(realShapes[name]!).map(([, shape]) => shape.reduce((product, n) => product * n, 1));
  expect(counts.reduce((sum, count) => sum + count, 0)).toBe(parameters);
});

/** Two layers and a seventh of the width; head dim, biases, ties and rotary scaling stay. */
const small = (shape: RealShape): RealShape => ({
  ...shape,
  vocab_size: 1344,
  hidden_size: 2 * shape.head_dim,
  intermediate_size: 3 * shape.head_dim,
  num_hidden_layers: 2,
  num_attention_heads: shape.num_attention_heads / shape.num_key_value_heads,
  num_key_value_heads: 1,
});

it.each(['0.5b', '8b'])('a small one of the kind of %s is the same each time, and computes', async (name) => {
  const shape = small(realShapes[name]!);
  const digests = new Set<string>();
  for (const dir of ['one', 'two'].map((sub) => join(folder, sub))) {
    const shares: number[] = [];
    await makeRealModel(dir, shape, tokenizerDir, (share) => shares.push(share));
    expect(shares.at(-1)).toBe(1);
    const weights = await readFile(join(dir, 'model.safetensors'));
    digests.add(createHash('sha256').update(weights).digest('hex'));
    expect(await readModelConfig(dir)).toMatchObject({
      family: shape.model_type,
      headDim: shape.head_dim,
      tiedEmbeddings: shape.tie_word_embeddings,
      qkvBias: name === '0.5b',
      maxModelTokens: shape.max_position_embeddings,
    });
  }
  expect(digests.size).toBe(1);
  const options = { blockTokens: 16, blockCount: 8, maxStepTokens: 64, maxStepSequences: 2, threads: 1 };
  const executor = await createExecutor({ modelDir: join(folder, 'one'), ...options });
  try {
    const tokens = Array.from({ length: 40 }, (_, i) => (i * i * 7 + 3) % shape.vocab_size);
    const whole = await runStep(executor, [{ blocks: [1, 2, 3], computed: 0, tokens }]);
    const other = await runStep(executor, [{ blocks: [5, 6, 7], computed: 0, tokens: [9, ...tokens.slice(1)] }]);
    const rest = await runStep(executor, [{ blocks: [1, 2, 4], computed: 32, tokens: tokens.slice(32) }]);
    expect(relativeError(rest.logits!, whole.logits!)).toBeLessThan(1e-4);
    expect(relativeError(other.logits!, whole.logits!)).toBeGreaterThan(1e-2); // the first token is seen by the last one
  } finally {
    await executor.close();
  }
});

it('is refused in one line, before anything is written, where the disk has no room', async () => {
  const huge = { ...realShapes['8b']!, vocab_size: 2 ** 40 };
  const made = makeRealModel(join(folder, 'huge'), huge, tokenizerDir);
  await expect(made).rejects.toMatchObject({
    code: 'MODEL',
    message: expect.stringMatching(/GiB, the disk has .* left/),
  });
  expect(await readdir(folder)).toEqual([]);
});

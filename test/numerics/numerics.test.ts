/**
 * The executor's logits against Hugging Face transformers in fp32 (golden files by make_golden.py; all families, rope
 * scalings, biases, windows, dtypes, shards), however the prompt is cut into chunks. Tolerance 1e-3 of the largest logit;
 * what is reached is about 1e-6. transformers run live: live.slow.test.ts.
 */
import { createExecutor, type Executor } from '@kvtier/executor';
import {
  blocksFor,
  goldenDir,
  goldenFamilies,
  prefill,
  readGolden,
  relativeError,
  runStep,
} from '@kvtier/executor/testing';
import { afterEach, describe, expect, it } from 'vitest';

const tolerance = 1e-3;

let executor: Executor | undefined;
afterEach(async () => {
  await executor?.close();
  executor = undefined;
});

async function openModel(modelDir: string, blockTokens = 16): Promise<Executor> {
  executor = await createExecutor({
    modelDir,
    blockTokens,
    blockCount: 512,
    threads: 2,
    maxStepTokens: 1024,
    maxStepSequences: 8,
  });
  return executor;
}

describe.each(goldenFamilies)('%s', (name) => {
  const { tokens, positions, logits } = readGolden(name);

  it('gives the logits of transformers for whole prompts', async () => {
    const model = await openModel(goldenDir(name));
    for (const [i, position] of positions.entries()) {
      const [row] = await prefill(model, tokens.slice(0, position + 1), [position + 1]);
      expect(relativeError(row!, logits[i]!)).toBeLessThan(tolerance);
    }
  });

  it.each([3, 16])('gives them for chunks that end anywhere, at %i tokens per block', async (blockTokens) => {
    const model = await openModel(goldenDir(name), blockTokens);
    const rows = await prefill(
      model,
      tokens,
      positions.map((position) => position + 1),
    );
    for (const [i, row] of rows.entries()) expect(relativeError(row, logits[i]!)).toBeLessThan(tolerance);
  });

  it('gives them token by token', async () => {
    const model = await openModel(goldenDir(name));
    const rows = await prefill(
      model,
      tokens,
      tokens.map((_, i) => i + 1),
    );
    for (const [i, position] of positions.entries()) {
      expect(relativeError(rows[position]!, logits[i]!)).toBeLessThan(tolerance);
    }
  });

  it('gives them in a batch with other sequences', async () => {
    const model = await openModel(goldenDir(name));
    const last = tokens.length - 1;
    await prefill(model, tokens.slice(0, last), [last], 20);
    const result = await runStep(model, [
      { blocks: blocksFor(41, 16, 1), computed: 0, tokens: tokens.slice(0, 41) },
      { blocks: blocksFor(last + 1, 16, 20), computed: last, tokens: tokens.slice(last) },
      { blocks: blocksFor(17, 16, 40), computed: 0, tokens: tokens.slice(0, 17), sample: false },
      { blocks: blocksFor(1, 16, 60), computed: 0, tokens: tokens.slice(0, 1) },
    ]);
    const vocab = model.model.vocabSize;
    const row = (i: number) => result.logits!.subarray(i * vocab, (i + 1) * vocab);
    expect(relativeError(row(0), logits[positions.indexOf(40)]!)).toBeLessThan(tolerance);
    expect(relativeError(row(1), logits[positions.indexOf(last)]!)).toBeLessThan(tolerance);
    expect(relativeError(row(2), logits[0]!)).toBeLessThan(tolerance);
    expect([...result.tokenIds].map((id) => id >= 0)).toEqual([true, true, false, true]);
  });
});

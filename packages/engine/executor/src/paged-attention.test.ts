/**
 * Property: however prompts are cut into chunks, batched with others, and scattered over blocks, each sampled row has the
 * logits of the naive model, which knows none of that, and the very same bits each time. Prompts are long enough for several tiles of queries and of keys.
 */
import { fileURLToPath } from 'node:url';
import fc from 'fast-check';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { createExecutor, type Executor } from './index.ts';
import { naiveModel } from './testing/naive.ts';
import { type Piece, relativeError, runStep } from './testing/run-step.ts';

const modelDir = fileURLToPath(new URL('../../../../test/numerics/golden/llama', import.meta.url));
const longest = 300;
const prompts = [11, 17, 23].map((step) =>
  Array.from({ length: longest }, (_, i) => 3 + ((i * i * step + 7 * i) % 150)),
);
const tolerance = 1e-4;

let expected: Float64Array[][];
beforeAll(async () => {
  const naive = await naiveModel(modelDir);
  expected = prompts.map((prompt) => naive(prompt));
});

describe.each([1, 5, 16, 64])('%i tokens per block', (blockTokens) => {
  const perSequence = Math.ceil(longest / blockTokens);
  let executor: Executor;
  beforeAll(async () => {
    const blockCount = prompts.length * perSequence + 1;
    executor = await createExecutor({
      modelDir,
      blockTokens,
      blockCount,
      threads: 3,
      maxStepTokens: prompts.length * longest,
      maxStepSequences: prompts.length,
    });
  });
  afterAll(() => executor.close());

  it('gives the logits of the naive model, and the same bits in any company', async () => {
    const seen = new Map<string, Buffer>();
    const cuts = fc.array(fc.oneof(fc.integer({ min: 1, max: 5 }), fc.integer({ min: 1, max: longest })), {
      minLength: 1,
      maxLength: 8,
    });
    const shuffled = fc.shuffledSubarray(
      Array.from({ length: prompts.length * perSequence }, (_, i) => i + 1),
      { minLength: prompts.length * perSequence },
    );
    await fc.assert(
      fc.asyncProperty(fc.array(cuts, { minLength: 3, maxLength: 3 }), shuffled, async (chunks, blocks) => {
        const computed = [0, 0, 0];
        for (let round = 0; round < 8; round++) {
          const pieces: Piece[] = [];
          const ends: [number, number][] = [];
          for (const [s, prompt] of prompts.entries()) {
            const count = Math.min(chunks[s]![round] ?? 0, longest - computed[s]!);
            if (count === 0) continue;
            const end = computed[s]! + count;
            pieces.push({
              blocks: blocks.slice(s * perSequence, (s + 1) * perSequence),
              computed: computed[s]!,
              tokens: prompt.slice(computed[s]!, end),
            });
            ends.push([s, end - 1]);
            computed[s] = end;
          }
          if (pieces.length === 0) continue;
          const { logits } = await runStep(executor, pieces);
          const vocab = executor.model.vocabSize;
          for (const [i, [s, last]] of ends.entries()) {
            const bits = Buffer.from(logits!.slice(i * vocab, (i + 1) * vocab).buffer);
            const before = seen.get(`${s} ${last}`) ?? bits;
            seen.set(`${s} ${last}`, before);
            expect(bits.equals(before), `token ${last} of prompt ${s}`).toBe(true);
            expect(relativeError(logits!.subarray(i * vocab, (i + 1) * vocab), expected[s]![last]!)).toBeLessThan(
              tolerance,
            );
          }
        }
      }),
      { numRuns: 6 },
    );
  });
});

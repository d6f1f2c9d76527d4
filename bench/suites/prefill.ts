/**
 * How fast the CPU executor computes: prefill's share of the machine's sgemm peak, decode's share of its memory bandwidth.
 * The peak is measured in turns with prefill, over as many FLOP, medians of both: neighbours on the machine slow
 * both alike. Decode and bandwidth: the best of each.
 */
import { availableParallelism } from 'node:os';
import { createExecutor, type Executor } from '@kvtier/executor';
import { binding } from '@kvtier/executor/testing';
import { resolveModel } from '@kvtier/model';
import { argumentsOf } from '../arguments.ts';
import { type Figure, median, rate, type Suite } from '../figures.ts';

const prompts = [2000, 4000];
const repeats = 5;
const decodeTokens = 32;
const blockTokens = 16;
const elementBytes = 4;
const peakSize = 2048;

/** One sequence, its blocks 1, 2, …; returns the step's elapsedUs. */
async function step(executor: Executor, computed: number, queries: number): Promise<number> {
  const blocks = Math.ceil((computed + queries) / blockTokens);
  const result = await executor.execute({
    tokenIds: Int32Array.from({ length: queries }, (_, i) => (computed + i * 7) % executor.model.vocabSize),
    queryTokens: Int32Array.of(queries),
    computedTokens: Int32Array.of(computed),
    blockTables: Int32Array.from({ length: blocks }, (_, i) => i + 1),
    blockTableStride: blocks,
    sample: Uint8Array.of(1),
    temperature: Float32Array.of(0),
    topK: Int32Array.of(0),
    topP: Float32Array.of(1),
    seed: BigUint64Array.of(0n),
  });
  return result.elapsedUs;
}

/** Weights of the matrices every token goes through; the embedding is looked up, the LM head sees one row. */
function matrixParameters({ model }: Executor): number {
  const { hiddenSize, intermediateSize, heads, kvHeads, headDim, layers } = model;
  return layers * (hiddenSize * headDim * (2 * heads + 2 * kvHeads) + 3 * hiddenSize * intermediateSize);
}

/** What the algorithm needs: 2 per weight and token, and the causal half of the attention's two products. */
function prefillFlop(executor: Executor, tokens: number): number {
  const { heads, headDim, layers } = executor.model;
  const pairs = (tokens * (tokens + 1)) / 2;
  return 2 * matrixParameters(executor) * tokens + layers * 4 * heads * headDim * pairs;
}

const suite: Suite = {
  name: 'prefill',
  description: 'CPU executor: prefill against sgemm peak, decode against memory bandwidth (random:25m)',
  needs: ['libopenblas0'],
  async run({ args, log }): Promise<Figure[]> {
    argumentsOf('prefill', args, {});
    const threads = availableParallelism();
    const { dir } = await resolveModel('random:25m', (line, share) => log(`${line}: ${Math.round(100 * share)} %`));
    const executor = await createExecutor({
      modelDir: dir,
      blockTokens,
      blockCount: 300,
      threads,
      maxStepTokens: 4096,
      maxStepSequences: 1,
    });
    const figures: Figure[] = [];
    try {
      await step(executor, 0, 512); // warm up
      for (const tokens of prompts) {
        const times: number[] = [];
        const peaks: number[] = [];
        const flop = prefillFlop(executor, tokens);
        for (let i = 0; i < repeats; i++) {
          peaks.push(
            await binding().sgemmRate(peakSize, threads, Math.ceil(flop / (2 * peakSize ** 3)), 'libopenblas.so.0'),
          );
          times.push(await step(executor, 0, tokens));
        }
        const timeUs = median(times);
        log(`${tokens} tokens: ${Math.round((tokens / timeUs) * 1e6)} tokens/s, ${(timeUs / 1e3).toFixed(0)} ms`);
        const name = `sgemm ${peakSize}³, ${threads} threads`;
        figures.push(rate(`prefill-${tokens}`, flop / timeUs / 1e3, 'GFLOP/s', median(peaks) / 1e9, name));
      }

      const bandwidth = await binding().readRate(1 << 29, threads);
      const context = prompts[0]!;
      const times: number[] = [];
      for (let i = 0; i < decodeTokens; i++) times.push(await step(executor, context + i, 1));
      const { vocabSize, hiddenSize } = executor.model;
      const bytes =
        elementBytes * (matrixParameters(executor) + vocabSize * hiddenSize) +
        (context / blockTokens) * executor.kv.blockBytes;
      log(
        `decode at ${context} tokens: ${(median(times) / 1e3).toFixed(1)} ms per token, best ${(Math.min(...times) / 1e3).toFixed(1)}`,
      );
      figures.push(
        rate('decode', bytes / Math.min(...times) / 1e3, 'GB/s', bandwidth / 1e9, 'reading memory, all threads'),
      );
    } finally {
      await executor.close();
    }
    return figures;
  },
};

export default suite;

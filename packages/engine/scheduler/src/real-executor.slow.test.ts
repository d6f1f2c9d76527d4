/** The engine over the real CPU executor and the demo model: batching, chunking, preemption and the kind of prefix cache change no answer. */
import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { createExecutor } from '@kvtier/executor';
import { ChainHasher } from '@kvtier/identity';
import type { PrefixCacheKind } from '@kvtier/prefix-cache';
import { expect, it } from 'vitest';
import { noConnector } from './connector.ts';
import { Engine } from './engine.ts';
import type { EngineStats } from './types.ts';

const modelDir = fileURLToPath(new URL('../../../../models/demo/model', import.meta.url));
const addon = fileURLToPath(new URL('../../../../build/executor/kvtier_executor.node', import.meta.url));
const missing = [modelDir, addon].filter((path) => !existsSync(path));
if (missing.length > 0) console.warn(`SKIPPED the engine over the real executor: ${missing.join(', ')} not there`);

const requestCount = 10;

async function answers(
  blockCount: number,
  maxStepTokens: number,
  together: boolean,
  prefixCache: PrefixCacheKind = 'blocks',
): Promise<{ tokens: number[][]; stats: EngineStats }> {
  const blockTokens = 16;
  const options = { modelDir, blockTokens, blockCount, threads: 2, maxStepTokens, maxStepSequences: 8 };
  const executor = await createExecutor(options);
  const engine = new Engine({
    executor,
    connector: noConnector,
    hasher: new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }),
    eosTokenIds: [],
    prefixCache,
    limits: { maxStepTokens, maxSequences: 8, maxWaiting: 100 },
  });
  const { vocabSize } = executor.model;
  const generate = (i: number): Promise<number[]> =>
    new Promise((resolve, reject) => {
      const tokens: number[] = [];
      const request = {
        requestId: `r${i}`,
        // 40 tokens in common, then its own.
        promptTokenIds: Int32Array.from({ length: 60 + i * 17 }, (_, j) => (j < 40 ? j * 5 : j * 5 + i) % vocabSize),
        maxTokens: 40,
        temperature: i % 2 === 0 ? 0 : 0.8,
        topK: i === 3 ? 2 ** 32 - 1 : 20, // more than there are: all
        topP: 0.9,
        seed: 7n,
      };
      engine.submit(request, (output) => {
        tokens.push(...output.tokenIds);
        if (output.error) reject(output.error);
        else if (output.finishReason !== '') resolve(tokens);
      });
    });
  try {
    const tokens: number[][] = [];
    const indexes = Array.from({ length: requestCount }, (_, i) => i);
    if (together) tokens.push(...(await Promise.all(indexes.map(generate))));
    else for (const i of indexes) tokens.push(await generate(i));
    return { tokens, stats: engine.stats() };
  } finally {
    await engine.close();
    await executor.close();
  }
}

it.skipIf(missing.length > 0)('answers alike alone, in a batch, and when blocks run out', async () => {
  const alone = await answers(400, 512, false);
  const batched = await answers(400, 64, true);
  const preempted = await answers(40, 32, true);
  expect(batched.tokens).toEqual(alone.tokens);
  expect(preempted.tokens).toEqual(alone.tokens);
  expect(preempted.stats.preemptions).toBeGreaterThan(0);
  const radix = await answers(400, 64, true, 'radix');
  const preemptedRadix = await answers(40, 32, true, 'radix');
  expect(radix.tokens).toEqual(alone.tokens);
  expect(preemptedRadix.tokens).toEqual(alone.tokens);
  expect(preemptedRadix.stats.preemptions).toBeGreaterThan(0);
  for (const { stats } of [alone, batched, preempted, radix, preemptedRadix])
    expect(stats.freeBlocks).toBe(stats.blockCount - 1);
});

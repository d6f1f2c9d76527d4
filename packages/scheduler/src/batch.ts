/** One step as the executor wants it. The executor keeps the arrays until the step has ended; nothing else does. */
import type { Step } from '@kvtier/executor';
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { EngineRequest } from './request.ts';
import { drawSeed } from './seed.ts';

/** A request's share of a step: its next `count` tokens. */
export interface Share {
  readonly request: EngineRequest;
  readonly count: number;
}

/** This share reaches the end of the sequence, so the step draws a token after it. */
export const samples = ({ request, count }: Share): boolean => request.computedTokens + count === request.tokenCount;

export function buildStep(batch: readonly Share[], kv: PrefixCache): Step {
  const tables = batch.map(({ request }) => kv.blockTables(request.id));
  const blockTableStride = tables.reduce((longest, [table]) => Math.max(longest, table!.length), 1);
  const step = {
    tokenIds: new Int32Array(batch.reduce((sum, { count }) => sum + count, 0)),
    queryTokens: new Int32Array(batch.length),
    computedTokens: new Int32Array(batch.length),
    blockTables: new Int32Array(kv.groupCount * batch.length * blockTableStride),
    blockTableStride,
    sample: new Uint8Array(batch.length),
    temperature: new Float32Array(batch.length),
    topK: new Int32Array(batch.length),
    topP: new Float32Array(batch.length),
    seed: new BigUint64Array(batch.length),
  };
  let at = 0;
  batch.forEach((share, i) => {
    const { request, count } = share;
    step.tokenIds.set(request.tokenIds(request.computedTokens, request.computedTokens + count), at);
    at += count;
    step.queryTokens[i] = count;
    step.computedTokens[i] = request.computedTokens;
    for (const [group, table] of tables[i]!.entries())
      step.blockTables.set(table, (group * batch.length + i) * blockTableStride);
    step.temperature[i] = request.params.temperature;
    step.topK[i] = request.params.topK;
    step.topP[i] = request.params.topP;
    if (!samples(share)) return;
    step.sample[i] = 1;
    step.seed[i] = drawSeed(request.seed, request.tokenCount);
  });
  return step;
}

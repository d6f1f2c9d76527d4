/** One step as the executor wants it. The executor keeps the arrays until the step has ended; nothing else does. */

import type { Step, StepImport } from '@kvtier/executor';
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { ArrivedLoad } from './connector.ts';
import type { EngineRequest } from './request.ts';
import { drawSeed } from './seed.ts';

const maxInt32 = 0x7fff_ffff;

/** A request's share of a step: its next `count` tokens. */
export interface Share {
  readonly request: EngineRequest;
  readonly count: number;
  /** The blocks of its computed tokens come in with the step. */
  readonly arrived?: ArrivedLoad | undefined;
}

/** This share reaches the end of the sequence, so the step draws a token after it. */
export const samples = ({ request, count }: Share): boolean =>
  request.draws && request.computedTokens + count === request.tokenCount;

/**
 * (Plain loops: this runs for every request in every step, and `set` with a plain array costs more than the copy.)
 */
export function buildStep(batch: readonly Share[], kv: PrefixCache): Step {
  const count = batch.length;
  const { groupCount } = kv;
  const tables = new Array<readonly number[]>(groupCount * count);
  let blockTableStride = 1;
  let tokenCount = 0;
  for (let i = 0; i < count; i++) {
    const { id } = batch[i]!.request;
    for (let group = 0; group < groupCount; group++) tables[group * count + i] = kv.blockTable(id, group);
    blockTableStride = Math.max(blockTableStride, tables[i]!.length);
    tokenCount += batch[i]!.count;
  }
  const imported = batch.findIndex(({ arrived }) => arrived);
  const step: Step & { import?: StepImport } = {
    tokenIds: new Int32Array(tokenCount),
    queryTokens: new Int32Array(count),
    computedTokens: new Int32Array(count),
    blockTables: new Int32Array(groupCount * count * blockTableStride),
    blockTableStride,
    sample: new Uint8Array(count),
    temperature: new Float32Array(count),
    topK: new Int32Array(count),
    topP: new Float32Array(count),
    seed: new BigUint64Array(count),
  };
  if (imported >= 0) step.import = { sequence: imported, ...batch[imported]!.arrived!.blocks };
  let at = 0;
  for (let i = 0; i < count; i++) {
    const share = batch[i]!;
    const { request } = share;
    const { params, computedTokens } = request;
    request.copyTokens(computedTokens, share.count, step.tokenIds, at);
    at += share.count;
    step.queryTokens[i] = share.count;
    step.computedTokens[i] = computedTokens;
    step.temperature[i] = params.temperature;
    step.topK[i] = Math.min(params.topK, maxInt32); // the vocabulary is smaller: so many are all
    step.topP[i] = params.topP;
    if (!samples(share)) continue;
    step.sample[i] = 1;
    // What is greedy draws nothing.
    if (params.temperature !== 0) step.seed[i] = drawSeed(request.seed, request.tokenCount);
  }
  // A row for each request, group by group.
  for (let row = 0; row < tables.length; row++) copyTable(tables[row]!, step.blockTables, row * blockTableStride);
  return step;
}

function copyTable(table: readonly number[], target: Int32Array, at: number): void {
  for (let block = 0; block < table.length; block++) target[at + block] = table[block]!;
}

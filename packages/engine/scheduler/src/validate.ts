/** What a request may ask for; everything else is one line that says what to change. */
import { KvError } from '@kvtier/errors';
import type { GenerateRequest } from './types.ts';

/** No hand-off waits longer, whatever its caller asks for. */
const longestWaitMs = 600_000;
const mostStopTokens = 1_024;

/** `blockTokens`: of the KV cache. `maxTotalTokens`: prompt and answer together. */
export interface RequestBounds {
  readonly vocabSize: number;
  readonly maxTotalTokens: number;
  readonly blockTokens: number;
}

/** Throws KvError REQUEST or TOO_LONG. */
export function checkRequest(params: GenerateRequest, bounds: RequestBounds): void {
  const { vocabSize, maxTotalTokens, blockTokens } = bounds;
  const { requestId, promptTokenIds, maxTokens, temperature, topK, topP, stopTokenIds = [], loraName } = params;
  const refuse = (problem: string): never => {
    throw new KvError('REQUEST', `request ${requestId}: ${problem}`);
  };
  const count = promptTokenIds.length;
  if (count === 0) refuse('the prompt is empty; send at least one token');
  const { prefillOnly, handOff } = params;
  if (prefillOnly && handOff) refuse('prefillOnly and handOff exclude each other; ask for one of them');
  const leastTokens = prefillOnly && !prefillOnly.draws ? 0 : 1;
  if (!Number.isInteger(maxTokens) || maxTokens < leastTokens)
    refuse(`maxTokens is ${maxTokens}; ask for at least one token`);
  const whole = Math.floor(count / blockTokens);
  const checkBlocks = (name: string, blocks: number): void => {
    if (!Number.isInteger(blocks) || blocks < 1 || blocks > whole)
      refuse(`${name}.blocks is ${blocks}; the prompt has ${whole} whole blocks, ask for 1 to ${whole}`);
  };
  const checkWait = (name: string, ms: number): void => {
    if (!Number.isInteger(ms) || ms < 1 || ms > longestWaitMs)
      refuse(`handOff.${name} is ${ms}; use 1 to ${longestWaitMs} ms`);
  };
  if (prefillOnly) {
    checkBlocks('prefillOnly', prefillOnly.blocks);
    const { stepBlocks = 0 } = prefillOnly;
    if (!Number.isInteger(stepBlocks) || stepBlocks < 0)
      refuse(`prefillOnly.stepBlocks is ${stepBlocks}; use 0 (as many as fit) or a whole number`);
  }
  if (handOff) {
    checkBlocks('handOff', handOff.blocks);
    checkWait('stallMs', handOff.stallMs);
    checkWait('deadlineMs', handOff.deadlineMs);
  }
  const { betweenMs = 0 } = params;
  if (!(betweenMs >= 0 && betweenMs <= longestWaitMs))
    refuse(`betweenMs is ${betweenMs}; use 0 (off) to ${longestWaitMs} ms`);
  if (!Number.isFinite(Math.fround(temperature)) || temperature < 0)
    refuse(`temperature is ${temperature}; use 0 or more`);
  if (!Number.isInteger(topK) || topK < 0) refuse(`topK is ${topK}; use 0 (off) or a whole number`);
  // As the executor gets it: 1e-46 is none there.
  if (!(Math.fround(topP) > 0 && topP <= 1)) refuse(`topP is ${topP}; use a number above 0, at most 1 (off)`);
  if (loraName) refuse(`no adapter named ${JSON.stringify(loraName)} is loaded; leave loraName empty`);
  const mode = params.kvCacheReportMode ?? '';
  if (mode !== '' && mode !== 'full')
    refuse(`kvCacheReportMode is ${JSON.stringify(mode)}; use "full" or leave it out`);
  if (stopTokenIds.length > mostStopTokens)
    refuse(`stopTokenIds has ${stopTokenIds.length} ids; at most ${mostStopTokens} are taken`);
  const isToken = (id: number): boolean => Number.isInteger(id) && id >= 0 && id < vocabSize;
  if (!stopTokenIds.every(isToken))
    refuse(`stopTokenIds has an id that is not in the vocabulary (0..${vocabSize - 1})`);
  // Ten thousand of them: a call for each takes several times as long as looking at them.
  for (let at = 0; at < count; at++) {
    const id = promptTokenIds[at]!;
    if (id < 0 || id >= vocabSize) refuse(`prompt token ${id} is not in the vocabulary (0..${vocabSize - 1})`);
  }
  if (count + 1 > maxTotalTokens) {
    const fits = `at most ${maxTotalTokens - 1} fit with room for an answer; shorten it`;
    throw new KvError('TOO_LONG', `request ${requestId}: the prompt has ${count} tokens; ${fits}`);
  }
}

/** What a request hears that is prefilled for another worker, and nothing can take its blocks. */
export function noTier(requestId: string): KvError {
  const problem = 'no cache node is attached to take its blocks; prefill it elsewhere';
  return new KvError('DISCONNECTED', `request ${requestId}: ${problem}`, { retry: true });
}

/** What a request may ask for; everything else is one line that says what to change. */
import { KvError } from '@kvtier/errors';
import type { GenerateRequest } from './types.ts';

/** Throws KvError REQUEST or TOO_LONG. `maxTotalTokens`: prompt and answer together. */
export function checkRequest(params: GenerateRequest, vocabSize: number, maxTotalTokens: number): void {
  const { requestId, promptTokenIds, maxTokens, temperature, topK, topP, stopTokenIds = [], loraName } = params;
  const refuse = (problem: string): never => {
    throw new KvError('REQUEST', `request ${requestId}: ${problem}`);
  };
  const count = promptTokenIds.length;
  if (count === 0) refuse('the prompt is empty; send at least one token');
  if (!Number.isInteger(maxTokens) || maxTokens < 1) refuse(`maxTokens is ${maxTokens}; ask for at least one token`);
  if (!Number.isFinite(temperature) || temperature < 0) refuse(`temperature is ${temperature}; use 0 or more`);
  if (!Number.isInteger(topK) || topK < 0) refuse(`topK is ${topK}; use 0 (off) or a whole number`);
  if (!(topP > 0 && topP <= 1)) refuse(`topP is ${topP}; use a number above 0, at most 1 (off)`);
  if (loraName) refuse(`no adapter named ${JSON.stringify(loraName)} is loaded; leave loraName empty`);
  const mode = params.kvCacheReportMode ?? '';
  if (mode !== '' && mode !== 'full')
    refuse(`kvCacheReportMode is ${JSON.stringify(mode)}; use "full" or leave it out`);
  const isToken = (id: number): boolean => Number.isInteger(id) && id >= 0 && id < vocabSize;
  if (!stopTokenIds.every(isToken))
    refuse(`stopTokenIds has an id that is not in the vocabulary (0..${vocabSize - 1})`);
  for (const id of promptTokenIds)
    if (!isToken(id)) refuse(`prompt token ${id} is not in the vocabulary (0..${vocabSize - 1})`);
  if (count + 1 > maxTotalTokens) {
    const fits = `at most ${maxTotalTokens - 1} fit with room for an answer; shorten it`;
    throw new KvError('TOO_LONG', `request ${requestId}: the prompt has ${count} tokens; ${fits}`);
  }
}

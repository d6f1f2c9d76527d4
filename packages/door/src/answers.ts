/**
 * The answers of one HTTP request: prompts × n calls to the engine at once, tokens turned into text, stop strings found.
 *
 * Invariant: when this returns or throws, no call of the request is still running at the engine. The first failure
 * cancels the others; a stop string cancels its own call.
 */
import { KvError } from '@kvtier/errors';
import type { CacheUse, GenerateRequest } from '@kvtier/wire/grpc';
import type { EngineLink, Model } from './engine-link.ts';
import { badParameter } from './errors.ts';
import type { GenerationParams, Prompt } from './params.ts';
import { StopMatcher } from './stop-matcher.ts';
import type { Tokenizer } from './tokenizer.ts';

export type FinishReason = 'stop' | 'length';

/** What an answer grew by. */
export interface Delta {
  /** Index of the answer: prompt index × n + number of the answer to it. */
  readonly index: number;
  readonly text: string;
  /** The engine's tokens of this delta, with one that ended the answer. */
  readonly tokenIds: readonly number[];
  /** The first of its answer. */
  readonly first: boolean;
  readonly finishReason: FinishReason | null;
}

/** Sums over all answers; a prompt with several answers counts once. */
export interface Totals {
  promptTokens: number;
  completionTokens: number;
  cachedTokens: number;
  readonly tokensByTier: Record<string, number>;
  queueUs: number;
  loadUs: number;
  prefillUs: number;
}

export interface Plan {
  readonly requestId: string;
  readonly model: Model;
  readonly prompts: readonly (readonly number[])[];
  readonly params: GenerationParams;
}

/**
 * Token ids of a prompt, as far as they leave room for an answer.
 * @throws HttpError 400: too long, empty, or ids that the model does not have
 */
export function promptTokens(
  prompt: Prompt,
  model: Model,
  params: Pick<GenerationParams, 'maxTokens' | 'maxTokensParam'>,
  addSpecialTokens: boolean,
): readonly number[] {
  const { maxModelTokens, vocabSize } = model.description;
  const tooLong = (tokens: number, exact: boolean): Error => {
    const answer = params.maxTokens ?? 1;
    return badParameter(
      tokens >= maxModelTokens ? (addSpecialTokens ? 'prompt' : 'messages') : params.maxTokensParam,
      `This model's maximum context length is ${maxModelTokens} tokens. However, you requested ${exact ? '' : 'at least '}` +
        `${tokens + answer} tokens (${tokens} in the prompt, ${answer} for the completion). Shorten one of them.`,
      'context_length_exceeded',
    );
  };
  if (typeof prompt === 'string' && model.tokenizer.leastTokens(prompt) >= maxModelTokens) {
    throw tooLong(model.tokenizer.leastTokens(prompt), false);
  }
  let ids: readonly number[];
  try {
    ids =
      typeof prompt === 'string'
        ? model.tokenizer.encode(prompt, { addSpecialTokens, maxTokens: maxModelTokens })
        : prompt;
  } catch (error) {
    throw error instanceof KvError && error.code === 'TOO_LONG' ? tooLong(maxModelTokens, false) : error;
  }
  if (ids.length === 0) throw badParameter('prompt', 'prompt: has no tokens; give at least one character.');
  const foreign = typeof prompt === 'string' ? undefined : ids.find((id) => id >= vocabSize);
  if (foreign !== undefined) {
    throw badParameter('prompt', `prompt: token id ${foreign} is outside of the vocabulary (0 to ${vocabSize - 1}).`);
  }
  if (ids.length + (params.maxTokens ?? 1) > maxModelTokens) throw tooLong(ids.length, true);
  return ids;
}

/**
 * Runs all answers. `onDelta` is awaited, so a slow reader slows the engine's stream and nothing piles up here.
 * @throws KvError, or what `onDelta` threw
 */
export async function runAnswers(
  link: EngineLink,
  plan: Plan,
  defaultMaxTokens: number,
  signal: AbortSignal,
  onDelta: (delta: Delta) => void | Promise<void>,
): Promise<Totals> {
  const totals: Totals = {
    promptTokens: plan.prompts.reduce((sum, prompt) => sum + prompt.length, 0),
    completionTokens: 0,
    cachedTokens: 0,
    tokensByTier: {},
    queueUs: 0,
    loadUs: 0,
    prefillUs: 0,
  };
  const siblings = new AbortController();
  const either = AbortSignal.any([signal, siblings.signal]);
  let failure: { readonly error: unknown } | undefined;
  const runs = plan.prompts.flatMap((prompt, promptIndex) =>
    Array.from({ length: plan.params.n }, async (_, answer) => {
      const index = promptIndex * plan.params.n + answer;
      try {
        const request = engineRequest(plan, prompt, index, answer, defaultMaxTokens);
        await runAnswer(
          link,
          plan,
          request,
          index,
          either,
          onDelta,
          (cache) => {
            if (answer === 0) addCacheUse(totals, cache);
          },
          () => totals.completionTokens++,
        );
      } catch (error) {
        failure ??= { error };
        siblings.abort(error);
      }
    }),
  );
  await Promise.all(runs);
  if (failure) throw failure.error;
  return totals;
}

async function runAnswer(
  link: EngineLink,
  plan: Plan,
  request: GenerateRequest,
  index: number,
  signal: AbortSignal,
  onDelta: (delta: Delta) => void | Promise<void>,
  onCacheUse: (cache: CacheUse) => void,
  onToken: () => void,
): Promise<void> {
  const { tokenizer, description } = plan.model;
  const detokenizer = tokenizer.detokenizer();
  const matcher = new StopMatcher(plan.params.stops);
  const endIds = new Set([...description.stopTokenIds, ...request.stopTokenIds]);
  let first = true;
  for await (const event of link.generate(request, signal)) {
    if (event.cache) onCacheUse(event.cache);
    let text = '';
    const finishReason = event.finishReason === '' ? null : asFinishReason(event.finishReason);
    for (const [at, id] of event.tokenIds.entries()) {
      onToken();
      // The token that ended the answer is no part of its text.
      if (finishReason === 'stop' && at === event.tokenIds.length - 1 && endIds.has(id)) break;
      const matched = matcher.push(detokenizer.push(id));
      text += matched.text;
      if (matched.stopped) {
        await onDelta({ index, text, tokenIds: event.tokenIds.slice(0, at + 1), first, finishReason: 'stop' });
        return; // leaving the loop cancels the call
      }
    }
    if (finishReason !== null) text += matcher.flush();
    if (event.tokenIds.length === 0 && finishReason === null) continue;
    await onDelta({ index, text, tokenIds: event.tokenIds, first, finishReason });
    first = false;
  }
}

/** `answer`: number among the answers to its prompt. Each draws from its own seed; the first from the one given. */
function engineRequest(
  plan: Plan,
  prompt: readonly number[],
  index: number,
  answer: number,
  defaultMaxTokens: number,
): GenerateRequest {
  const { sampling, maxTokens } = plan.params;
  const room = plan.model.description.maxModelTokens - prompt.length;
  return {
    requestId: index === 0 ? plan.requestId : `${plan.requestId}-${index}`,
    promptTokenIds: prompt as number[],
    maxTokens: maxTokens ?? Math.min(defaultMaxTokens, room),
    temperature: sampling.temperature,
    topK: sampling.topK,
    topP: sampling.topP,
    seed: sampling.seed === undefined ? undefined : derivedSeed(sampling.seed, answer),
    ignoreEos: sampling.ignoreEos,
    stopTokenIds: [...sampling.stopTokenIds],
    cacheSalt: sampling.cacheSalt,
    kvCacheReportMode: sampling.kvCacheReportMode,
    loraName: '',
  };
}

/** Far apart for neighbouring answers (the step of SplitMix64). */
const derivedSeed = (seed: number, answer: number): bigint =>
  BigInt.asUintN(64, BigInt(seed) + BigInt(answer) * 0x9e3779b97f4a7c15n);

const asFinishReason = (reason: string): FinishReason => (reason === 'length' ? 'length' : 'stop');

/** Tokens add up over prompts; they ran side by side, so of the times the longest counts. */
function addCacheUse(totals: Totals, cache: CacheUse): void {
  totals.cachedTokens += cache.cachedTokens;
  for (const [tier, tokens] of Object.entries(cache.tokensByTier)) {
    totals.tokensByTier[tier] = (totals.tokensByTier[tier] ?? 0) + tokens;
  }
  totals.queueUs = Math.max(totals.queueUs, cache.queueUs);
  totals.loadUs = Math.max(totals.loadUs, cache.loadUs);
  totals.prefillUs = Math.max(totals.prefillUs, cache.prefillUs);
}

/** Text of a prompt, for `echo`. */
export const promptText = (prompt: Prompt, tokenizer: Tokenizer): string =>
  typeof prompt === 'string' ? prompt : tokenizer.decode(prompt);

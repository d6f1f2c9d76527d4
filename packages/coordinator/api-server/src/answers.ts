/**
 * The answers of one HTTP request: prompts × n calls to the engine at once, tokens turned into text, stop strings found.
 *
 * Invariant: when this returns or throws, no call of the request is still running at the engine. The first failure
 * cancels the others; a stop string cancels its own call.
 */
import { setMaxListeners } from 'node:events';
import { setImmediate } from 'node:timers/promises';
import type { CacheUse, GenerateRequest } from '@kvtier/wire/grpc';
import { Detokenizer } from './detokenizer.ts';
import type { GenerationParams } from './params.ts';
import type { Model, RemoteEngine } from './remote-engine.ts';
import { StopMatcher } from './stop-matcher.ts';
import type { TokenIds } from './understand.ts';

/** Token ids written to the engine in one turn of the event loop; a longer prompt takes one for itself. */
const tokensPerTurn = 65_536;

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
  readonly prompts: readonly TokenIds[];
  readonly params: GenerationParams;
}

/**
 * Runs all answers. `onDelta` is awaited, so a slow reader slows the engine's stream and nothing piles up here.
 * @throws KvError, or what `onDelta` threw
 */
export async function runAnswers(
  remote: RemoteEngine,
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
  setMaxListeners(plan.prompts.length * plan.params.n + 1, either); // each answer listens
  let failure: { readonly error: unknown } | undefined;
  const run = async (prompt: TokenIds, index: number, answer: number): Promise<void> => {
    try {
      const request = engineRequest(plan, prompt, index, answer, defaultMaxTokens);
      await runAnswer(
        remote,
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
  };
  const runs: Promise<void>[] = [];
  let encoded = 0;
  for (const [promptIndex, prompt] of plan.prompts.entries()) {
    for (let answer = 0; answer < plan.params.n; answer++) {
      if (encoded >= tokensPerTurn) {
        await setImmediate();
        encoded = 0;
      }
      if (either.aborted) break;
      encoded += prompt.length;
      runs.push(run(prompt, promptIndex * plan.params.n + answer, answer));
    }
  }
  if (either.aborted) failure ??= { error: either.reason };
  await Promise.all(runs);
  if (failure) throw failure.error;
  return totals;
}

async function runAnswer(
  remote: RemoteEngine,
  plan: Plan,
  request: GenerateRequest,
  index: number,
  signal: AbortSignal,
  onDelta: (delta: Delta) => void | Promise<void>,
  onCacheUse: (cache: CacheUse) => void,
  onToken: () => void,
): Promise<void> {
  const { text, description } = plan.model;
  const detokenizer = new Detokenizer(text.table);
  const matcher = new StopMatcher(plan.params.stops);
  const endIds = new Set([...description.stopTokenIds, ...request.stopTokenIds]);
  let first = true;
  for await (const event of remote.generate(request, signal)) {
    if (event.cache) onCacheUse(event.cache);
    let grown = '';
    const finishReason = event.finishReason === '' ? null : asFinishReason(event.finishReason);
    for (const [at, id] of event.tokenIds.entries()) {
      onToken();
      // The token that ended the answer is no part of its text.
      if (finishReason === 'stop' && at === event.tokenIds.length - 1 && endIds.has(id)) break;
      const matched = matcher.push(detokenizer.push(id));
      grown += matched.text;
      if (matched.stopped) {
        await onDelta({ index, text: grown, tokenIds: event.tokenIds.slice(0, at + 1), first, finishReason: 'stop' });
        return; // leaving the loop cancels the call
      }
    }
    if (finishReason !== null) grown += matcher.flush();
    if (event.tokenIds.length === 0 && finishReason === null) continue;
    await onDelta({ index, text: grown, tokenIds: event.tokenIds, first, finishReason });
    first = false;
  }
}

/** `answer`: number among the answers to its prompt. Each draws from its own seed; the first from the one given. */
function engineRequest(
  plan: Plan,
  prompt: TokenIds,
  index: number,
  answer: number,
  defaultMaxTokens: number,
): GenerateRequest {
  const { sampling, maxTokens } = plan.params;
  const room = plan.model.description.maxModelTokens - prompt.length;
  return {
    requestId: index === 0 ? plan.requestId : `${plan.requestId}-${index}`,
    promptTokenIds: prompt as unknown as number[], // it is only read, id by id
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

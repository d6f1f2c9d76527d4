/**
 * The answers of one HTTP request: prompts × n calls to workers at once, tokens turned into text, stop strings found.
 *
 * An answer whose worker dies goes on at another: its prompt and the tokens it has given are the new prompt. What is drawn follows from
 * seed and position alone, so the other worker goes on as the first would have; text that is held back, for half a character or a stop
 * string that may come, goes on with it.
 *
 * Invariant: when this returns or throws, no call of the request is still running at a worker, and none is counted on one. The first
 * failure that is final cancels the others; a stop string cancels its own call.
 */
import { randomBytes } from 'node:crypto';
import { setMaxListeners } from 'node:events';
import { setImmediate } from 'node:timers/promises';
import type { Choice, Dispatch, DispatchRequest, Targets } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import type { HandedOff, HandOffs, InTime, Took } from '@kvtier/handoff';
import type { Keys } from '@kvtier/kv-index';
import type { PodHandOff } from '@kvtier/pod-handoff';
import type { OnEvent } from '@kvtier/registry';
import type { CacheUse, GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import { Detokenizer } from './detokenizer.ts';
import type { Engines } from './engines.ts';
import type { Expected } from './expected.ts';
import type { Model } from './models.ts';
import type { GenerationParams } from './params.ts';
import { StopMatcher } from './stop-matcher.ts';
import { Tries, type TryLimits } from './tries.ts';
import type { TokenIds } from './understand.ts';

/** Token ids written to the engine in one turn of the event loop; a longer prompt takes one for itself. */
const tokensPerTurn = 65_536;
/** What it takes to begin a call, in tokens that are written meanwhile: 16 calls a turn. */
const callTokens = 4_096;

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
  /** Of a split prompt; of several, of the last. */
  handOff?: Took;
  /** Answers that had begun and went on at another worker, so often. */
  moves: number;
}

export interface Plan {
  readonly requestId: string;
  /** W3C's, of the client. */
  readonly traceparent: string | undefined;
  readonly model: Model;
  readonly prompts: readonly TokenIds[];
  /** Of each prompt. */
  readonly keys: readonly Keys[];
  readonly params: GenerationParams;
  readonly defaultMaxTokens: number;
  /** performance.now() */
  readonly arrivedMs: number;
  readonly targets: Targets;
}

/** Where answers come from. */
export interface Workplace {
  readonly dispatch: Dispatch;
  readonly engines: Engines;
  /** Has other workers compute prompts where that pays; undefined: nobody does. */
  readonly handOffs: Pick<HandOffs, 'follow'> | undefined;
  readonly tries: TryLimits;
  readonly expected: Expected;
  /** Prefill and decode apart, for pods with OpenAI's API; and which of their requests would be answered too late. */
  readonly pods: PodHandOff;
  readonly inTime: Pick<InTime, 'admit' | 'came'>;
  /** Names of the only workers that get this model's requests; undefined: all that serve it. */
  among(model: string): ReadonlySet<string> | undefined;
}

export interface AnswersListener {
  /** Awaited, so a slow reader slows the worker's stream and nothing piles up here. */
  delta(delta: Delta): void | Promise<void>;
  /** A worker was chosen; `moved`: for an answer that has begun elsewhere. */
  chosen(choice: Choice, moved: boolean): void;
  /** Who computes the chosen worker's prompt; told again when that changes. */
  handedOff(choice: Choice, state: HandedOff): void;
  /** A worker failed; the answer is tried at another. */
  retried(error: unknown): void;
}

/** Runs all answers. @throws KvError (Outdated: its tokens are to be made anew), HttpError, or what the listener threw */
export async function runAnswers(
  place: Workplace,
  plan: Plan,
  signal: AbortSignal,
  listener: AnswersListener,
): Promise<Totals> {
  const totals: Totals = {
    promptTokens: plan.prompts.reduce((sum, prompt) => sum + prompt.length, 0),
    completionTokens: 0,
    cachedTokens: 0,
    tokensByTier: {},
    queueUs: 0,
    loadUs: 0,
    prefillUs: 0,
    moves: 0,
  };
  if (plan.prompts.length * plan.params.n === 1) {
    await new Answer(place, plan, 0, 0, totals, listener).run(signal);
    return totals;
  }
  const siblings = new AbortController();
  const either = AbortSignal.any([signal, siblings.signal]);
  setMaxListeners(plan.prompts.length * plan.params.n * 4, either); // each answer listens
  let failure: { readonly error: unknown } | undefined;
  const run = async (promptIndex: number, answer: number): Promise<void> => {
    try {
      await new Answer(place, plan, promptIndex, answer, totals, listener).run(either);
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
      encoded += callTokens + prompt.length;
      runs.push(run(promptIndex, answer));
    }
  }
  if (either.aborted) failure ??= { error: either.reason };
  await Promise.all(runs);
  if (failure) throw failure.error;
  return totals;
}

type Routed = Omit<DispatchRequest, 'except'>;

class Answer {
  readonly #place: Workplace;
  readonly #plan: Plan;
  readonly #keys: Keys;
  /** Index among all answers of the request. */
  readonly #index: number;
  /** The first of its prompt tells what was cached. */
  readonly #tellsCache: boolean;
  readonly #totals: Totals;
  readonly #listener: AnswersListener;
  readonly #prompt: TokenIds;
  readonly #request: GenerateRequest;
  readonly #detokenizer: Detokenizer;
  readonly #matcher: StopMatcher;
  readonly #endIds: ReadonlySet<number>;
  /** Tokens so far. */
  readonly #given: number[] = [];
  #isFirst = true;
  /** What the worker said of itself that gave the first of its tokens. */
  #begunAt: DispatchRequest['begunAt'];
  #hasCache = false;

  constructor(
    place: Workplace,
    plan: Plan,
    promptIndex: number,
    answer: number,
    totals: Totals,
    listener: AnswersListener,
  ) {
    this.#place = place;
    this.#plan = plan;
    this.#keys = plan.keys[promptIndex]!;
    this.#index = promptIndex * plan.params.n + answer;
    this.#tellsCache = answer === 0;
    this.#totals = totals;
    this.#listener = listener;
    this.#prompt = plan.prompts[promptIndex]!;
    this.#request = engineRequest(plan, this.#prompt, this.#index, answer);
    this.#detokenizer = new Detokenizer(plan.model.text.table);
    this.#matcher = new StopMatcher(plan.params.stops);
    this.#endIds = new Set([...plan.model.stopTokenIds, ...this.#request.stopTokenIds]);
  }

  async run(signal: AbortSignal): Promise<void> {
    const tries = new Tries(this.#place);
    for (;;) {
      const request = this.#rest();
      const routed = this.#routed(request);
      const choice = await tries.next(routed, signal);
      try {
        this.#listener.chosen(choice, !this.#isFirst);
        if (!this.#isFirst) this.#totals.moves++;
        await this.#follow(choice, routed, request, tries, signal);
        return;
      } catch (error) {
        tries.failed(error, choice, signal);
        this.#listener.retried(error);
      } finally {
        choice.ended();
      }
      // Its worker died between its last token and the word that it was the last.
      if (this.#given.length >= this.#request.maxTokens) return this.#tell(this.#matcher.flush(), [], 'length');
    }
  }

  /** Reads one worker's stream to its end. */
  #follow(choice: Choice, routed: Routed, request: GenerateRequest, tries: Tries, signal: AbortSignal): Promise<void> {
    let hasToken = false;
    // One that goes on finds what the answer has given, too: the worker that begins says what was cached.
    const begins = this.#isFirst;
    const onEvent: OnEvent = (event) => {
      if (!hasToken) {
        choice.firstToken();
        this.#begunAt ??= choice.worker.facts;
        tries.progressed();
        hasToken = true;
      }
      if (event.cache && begins) this.#countCache(event.cache);
      const told = this.#read(event);
      if (!this.#hasStopped) return told;
      // Nothing more is wanted: that cancels the call.
      return told === undefined ? false : told.then(() => false as const);
    };
    const { engines, handOffs } = this.#place;
    if (handOffs === undefined) return engines.follow(choice.worker.number, request, signal, onEvent);
    const { arrivedMs, targets } = this.#plan;
    const asked = { ...routed, arrivedMs, ...targets, hasBegun: !this.#isFirst };
    return handOffs.follow(choice, asked, request, signal, onEvent, (state) => {
      if (state.took) this.#totals.handOff = state.took;
      this.#listener.handedOff(choice, state);
    });
  }

  /** A stop string was found. */
  #hasStopped = false;

  #read({ tokenIds, finishReason: reason }: GenerateEvent): void | Promise<void> {
    const finishReason = reason === '' ? null : asFinishReason(reason);
    const { maxTokens } = this.#request;
    if (this.#given.length + tokenIds.length > maxTokens)
      throw nonsense(`gave more than the ${maxTokens} tokens asked for`);
    let grown = '';
    for (let at = 0; at < tokenIds.length; at++) {
      const id = tokenIds[at]!;
      this.#totals.completionTokens++;
      this.#given.push(id);
      // The token that ended the answer is no part of its text.
      if (finishReason === 'stop' && at === tokenIds.length - 1 && this.#endIds.has(id)) break;
      const matched = this.#matcher.push(this.#detokenizer.push(id));
      grown += matched.text;
      if (!matched.stopped) continue;
      this.#hasStopped = true;
      return this.#tell(grown, tokenIds.slice(0, at + 1), 'stop');
    }
    if (finishReason !== null) grown += this.#matcher.flush();
    if (tokenIds.length === 0 && finishReason === null) return undefined;
    return this.#tell(grown, tokenIds, finishReason);
  }

  #tell(text: string, tokenIds: readonly number[], finishReason: FinishReason | null): void | Promise<void> {
    const first = this.#isFirst;
    this.#isFirst = false;
    return this.#listener.delta({ index: this.#index, text, tokenIds, first, finishReason });
  }

  /** What is still to be generated. */
  #rest(): GenerateRequest {
    if (this.#given.length === 0) return this.#request;
    const promptTokenIds = new Uint32Array(this.#prompt.length + this.#given.length);
    promptTokenIds.set(this.#prompt);
    promptTokenIds.set(this.#given, this.#prompt.length);
    return {
      ...this.#request,
      promptTokenIds: promptTokenIds as unknown as number[],
      maxTokens: this.#request.maxTokens - this.#given.length,
    };
  }

  #routed({ requestId, promptTokenIds, maxTokens }: GenerateRequest): Routed {
    const { model, params, arrivedMs, targets } = this.#plan;
    return {
      id: requestId,
      model: model.name,
      among: this.#place.among(model.name),
      tokens: promptTokenIds.length,
      blockTokens: model.text.model.blocks?.blockTokens ?? 1,
      maxTokens,
      keys: this.#keys,
      session: params.session,
      textDigest: model.text.model.textDigest,
      begunAt: this.#begunAt,
      firstTokenByMs: targets.ttftMs === undefined || !this.#isFirst ? undefined : arrivedMs + targets.ttftMs,
    };
  }

  #countCache(cache: CacheUse): void {
    if (this.#hasCache || !this.#tellsCache) return;
    this.#hasCache = true;
    addCacheUse(this.#totals, cache);
  }
}

/** `answer`: number among the answers to its prompt. Each draws from its own seed; the first from the one given. */
function engineRequest(plan: Plan, prompt: TokenIds, index: number, answer: number): GenerateRequest {
  const { sampling, maxTokens } = plan.params;
  const room = plan.model.maxModelTokens - prompt.length;
  return {
    requestId: index === 0 ? plan.requestId : `${plan.requestId}-${index}`,
    promptTokenIds: prompt as unknown as number[], // it is only read, id by id
    maxTokens: maxTokens ?? Math.min(plan.defaultMaxTokens, room),
    temperature: sampling.temperature,
    topK: sampling.topK,
    topP: sampling.topP,
    seed: seedOf(sampling, answer),
    ignoreEos: sampling.ignoreEos,
    stopTokenIds: [...sampling.stopTokenIds],
    cacheSalt: sampling.cacheSalt,
    kvCacheReportMode: sampling.kvCacheReportMode,
    loraName: '',
    traceparent: plan.traceparent,
  };
}

/** Whatever is drawn has a seed, so that any worker can go on with it; what is greedy needs none. */
function seedOf({ seed, temperature }: GenerationParams['sampling'], answer: number): bigint | undefined {
  if (seed !== undefined) return derivedSeed(seed, answer);
  return temperature === 0 ? undefined : randomBytes(8).readBigUInt64LE();
}

/** Far apart for neighbouring answers (the step of SplitMix64). */
const derivedSeed = (seed: number, answer: number): bigint =>
  BigInt.asUintN(64, BigInt(seed) + BigInt(answer) * 0x9e3779b97f4a7c15n);

/** @throws KvError PROTOCOL: an answer that ended otherwise is not whole. */
function asFinishReason(reason: string): FinishReason {
  if (reason === 'length' || reason === 'stop') return reason;
  throw nonsense(`ended an answer with "${reason.slice(0, 64)}"`);
}

const nonsense = (what: string): KvError =>
  new KvError('PROTOCOL', `engine: ${what}; run workers and coordinator of one version`);

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

/**
 * One answer: tokens of one worker after another turned into text, stop strings found.
 *
 * An answer whose worker dies goes on at another: its prompt and the tokens it has given are the new prompt. What is drawn follows from
 * seed and position alone, so the other worker goes on as the first would have; text that is held back, for half a character or a stop
 * string that may come, goes on with it.
 *
 * Invariant: when `run` returns or throws, no call of the answer is still running at a worker, and none is counted on one. A stop string
 * cancels its own call.
 */
import type { Choice, DispatchRequest } from '@kvtier/dispatch';
import { KvError, type KvErrorCode } from '@kvtier/errors';
import type { Keys } from '@kvtier/kv-index';
import type { OnEvent } from '@kvtier/registry';
import type { CacheUse, GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import { Detokenizer } from './detokenizer.ts';
import {
  type AnswersListener,
  engineRequest,
  type FinishReason,
  type Plan,
  type Totals,
  type Workplace,
} from './plan.ts';
import { StopMatcher } from './stop-matcher.ts';
import { Tries } from './tries.ts';
import type { TokenIds } from './understand.ts';

type Routed = Omit<DispatchRequest, 'except'>;

/** How calls end for which no worker's loss is the reason. */
const tellsOfUs: ReadonlySet<KvErrorCode> = new Set(['CANCELLED', 'PROTOCOL']);

export class Answer {
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
  /** Its finish reason has been told. */
  #isFinished = false;
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
      let isWhole = false;
      try {
        this.#listener.chosen(choice, !this.#isFirst);
        if (!this.#isFirst) this.#totals.moves++;
        await this.#follow(choice, routed, request, tries, signal);
        isWhole = true;
        return;
      } catch (error) {
        // All of it was told: that its call broke then is nothing to it. What its client's leaving ends, and what is our defect, is.
        if (this.#isFinished && !signal.aborted && error instanceof KvError && !tellsOfUs.has(error.code)) return;
        tries.failed(error, choice, signal);
        this.#listener.retried(error, choice);
      } finally {
        choice.ended(isWhole ? this.#given.length : undefined);
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
    if (finishReason !== null) this.#isFinished = true;
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
      // Of a chat that names no end, whatever fits is the answer.
      wantedTokens:
        (params.maxTokens ?? this.#plan.defaultMaxTokens) === Number.POSITIVE_INFINITY ? undefined : maxTokens,
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

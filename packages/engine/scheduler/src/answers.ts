/**
 * The requests in the engine, and what each is told: tokens, how its hand-off stands, and its one end.
 *
 * What a step has drawn is taken in at once and told later (`handOut`): the next step is launched between the two.
 *
 * Invariants: every request that was added ends with exactly one output that has a finish reason or an error; nothing is told after
 * it; tokens are told in the order in which they were drawn.
 */
import { KvError } from '@kvtier/errors';
import { cacheUseOf } from './cache-use.ts';
import type { EngineRequest } from './request.ts';
import type { Scheduler } from './scheduler.ts';
import type { CacheUse, Clock, HandOffState, Output } from './types.ts';
import { noTier } from './validate.ts';

export interface AnswersOptions {
  readonly scheduler: Scheduler;
  readonly clock: Clock;
  readonly blockTokens: number;
  /** What it held is free. */
  readonly onAborted: () => void;
  readonly logger:
    | { error(details: object, message: string): void; warn(details: object, message: string): void }
    | undefined;
}

interface Untold {
  readonly request: EngineRequest;
  readonly output: Output;
  /** Its request's end comes behind it, untold, too. */
  isBeforeEnd?: boolean;
}

export class Answers {
  readonly counts = { finished: 0, aborted: 0, failed: 0, prefills: 0, prefilledBlocks: 0 };
  readonly #options: AnswersOptions;
  /** By the caller's id. */
  readonly #requests = new Map<string, EngineRequest>();
  /** Drawn, and not told yet. */
  #untold: Untold[] = [];

  constructor(options: AnswersOptions) {
    this.#options = options;
  }

  get count(): number {
    return this.#requests.size;
  }

  requests(): Iterable<EngineRequest> {
    return this.#requests.values();
  }

  get(requestId: string): EngineRequest | undefined {
    return this.#requests.get(requestId);
  }

  add(request: EngineRequest): void {
    this.#requests.set(request.requestId, request);
  }

  /** Its last output says so. False: there is no such request (any more). */
  abort(requestId: string): boolean {
    const request = this.#requests.get(requestId);
    if (!request) return false;
    this.counts.aborted++;
    this.#finish(request, { tokenIds: [], finishReason: 'abort' });
    this.#options.onAborted();
    return true;
  }

  failAll(error: KvError): void {
    for (const request of [...this.#requests.values()]) this.fail(request, error);
  }

  /** The blocks are in an unknown state: only the callers are told, nothing is freed. */
  tellAll(error: KvError): void {
    this.handOut();
    for (const request of this.#requests.values()) this.#emit(request, { tokenIds: [], finishReason: '', error });
    this.#requests.clear();
  }

  /** Everything drawn so far is told. False: there was nothing. */
  handOut(): boolean {
    if (this.#untold.length === 0) return false;
    const untold = this.#untold;
    this.#untold = [];
    for (const { request, output, isBeforeEnd } of untold) {
      const last = output.finishReason !== '';
      if (last || isBeforeEnd || request.state !== 'finished') this.#emit(request, output); // else: somebody has ended it meanwhile
    }
    return true;
  }

  /** A step drew what is no token of the model's from blocks that were there already: this is no failure yet. */
  beginsAnew({ requestId }: EngineRequest): void {
    this.#options.logger?.warn(
      { requestId },
      'engine: a request drew no token over blocks that were there already; it is computed anew without them, and they are forgotten here ' +
        "if it draws one then; should this come often, look at the machine's memory and its GPU",
    );
  }

  /** A step drew what is no token of the model's: no other request of the step has to do with it. */
  drewNoToken(request: EngineRequest, tokenId: number): void {
    const what =
      tokenId < 0
        ? 'its logits are no finite numbers; a number grew too large for gpu.computeDtype (f16: take bf16), or the weights are damaged'
        : `the executor drew token ${tokenId}, which is not in the vocabulary; check the model's weights`;
    const error = new KvError('MODEL', `request ${request.requestId}: ${what}`);
    this.#options.logger?.error({ err: error, requestId: request.requestId }, 'engine: a request failed');
    this.fail(request, error);
  }

  /** A step drew this token after its last one: told by the next `handOut`. */
  drawn(request: EngineRequest, tokenId: number): void {
    if (request.prefillOnly) {
      this.#drawnForAnother(request, tokenId);
      return;
    }
    request.append(tokenId);
    const { givenToken } = request;
    request.givenToken = undefined;
    const tokenIds = givenToken === undefined ? [tokenId] : [givenToken, tokenId];
    const plain = { tokenIds, finishReason: request.finishReason() };
    const output = request.firstOutputDone ? plain : { ...plain, ...this.#cacheUse(request) };
    if (output !== plain) this.#options.scheduler.load.settle(request);
    this.#untold.push({ request, output });
    if (output.finishReason !== '') this.#finished(request);
  }

  /** The answer goes on elsewhere, unless it ends with it; this request ends when its blocks are stored. */
  #drawnForAnother(request: EngineRequest, tokenId: number): void {
    const { blockTokens, clock } = this.#options;
    const cache = cacheUseOf(request, blockTokens, clock.nowUs());
    const output = { tokenIds: [tokenId], finishReason: request.finishReasonWith(tokenId), cache };
    this.#untold.push({ request, output });
    if (output.finishReason !== '') this.#finished(request);
  }

  #finished(request: EngineRequest): void {
    this.counts.finished++;
    this.#requests.delete(request.requestId);
    this.#options.scheduler.remove(request);
  }

  /** All that another worker wanted of this prompt is computed; undefined: the tier that was to take it is gone. */
  prefilled(request: EngineRequest, readyBlocks: number | undefined): void {
    if (readyBlocks === undefined) {
      this.fail(request, noTier(request.requestId));
      return;
    }
    this.counts.prefills++;
    this.counts.prefilledBlocks += readyBlocks;
    const handOff = { localBlocks: 0, readyBlocks };
    this.#finished(request);
    const output: Output = { tokenIds: [], finishReason: 'prefilled', ...this.#cacheUse(request), handOff };
    const before = this.#untold.filter((one) => one.request === request);
    if (before.length === 0) {
      // The scheduler may be at work.
      queueMicrotask(() => this.#emit(request, output));
      return;
    }
    // Behind the token that it has drawn.
    for (const one of before) one.isBeforeEnd = true;
    this.#untold.push({ request, output });
  }

  /** How its hand-off stands. */
  tell(request: EngineRequest, handOff: HandOffState): void {
    if (request.state !== 'finished') this.#emit(request, { tokenIds: [], finishReason: '', handOff });
  }

  /** With the first token, or the end of a request that has none. */
  #cacheUse(request: EngineRequest): { cache: CacheUse } {
    request.firstOutputDone = true;
    return { cache: cacheUseOf(request, this.#options.blockTokens, this.#options.clock.nowUs()) };
  }

  fail(request: EngineRequest, error: KvError): void {
    this.counts.failed++;
    this.#finish(request, { tokenIds: [], finishReason: '', error });
  }

  #finish(request: EngineRequest, output: Output): void {
    this.#requests.delete(request.requestId);
    this.#options.scheduler.remove(request);
    this.#emit(request, output);
  }

  #emit(request: EngineRequest, output: Output): void {
    try {
      request.onOutput(output);
    } catch (error) {
      this.#options.logger?.error({ err: error, requestId: request.requestId }, 'engine: an output callback threw');
      this.abort(request.requestId);
    }
  }
}

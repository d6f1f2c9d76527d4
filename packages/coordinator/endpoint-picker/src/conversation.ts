/**
 * One stream of a gateway: one HTTP request from its headers to the end of its answer.
 *
 *   start ─headers─► body ─all of it─► choosing ─► picked ─► answer's headers, body, trailers ─► end
 *                      └─ stalls, too long: 408 ┘      └─ nobody: 503, all saturated: 429, nonsense: a gRPC status
 *
 * Full duplex: nothing is answered before the whole body is here; then the headers with the endpoint, and the body sent back. Buffered:
 * the headers are let through to get the body, whose answer carries the endpoint. No body, or a gateway that waits for the headers'
 * answer before it sends pieces: the endpoint is chosen by load when the headers come.
 *
 * Invariants: one message is worked on at a time, and no other is read meanwhile; bytes held of a request are counted by `HeldBytes`, and
 * of its answer some KiB are kept (watched-answer.ts); every state has a deadline, its end, too, which a gateway that reads nothing would
 * put off; the request's share of a worker's load ends with the answer, with the stream, or at a deadline, exactly once.
 */
import { status } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import { BodySendMode, type HttpBody, type HttpHeaders, type ProcessingRequest } from '@kvtier/wire/ext-proc';
import { resetCall, toStatus } from '@kvtier/wire/grpc';
import { goesOn, headersGoOn, picked, type RequestPart, refused, sentBack } from './answers.ts';
import { type Asked, askedOf, type Metadata } from './asked.ts';
import { HeldBody } from './held-body.ts';
import type { HeldBytes } from './held-bytes.ts';
import type { PickerMetrics } from './metrics.ts';
import { Outgoing, type ProcessCall } from './outgoing.ts';
import type { BodyOrWhy, Picked, Picker } from './picker.ts';
import { type Outcome, refusalOf, saturated, stalled } from './refusal.ts';
import { WatchedAnswer } from './watched-answer.ts';

export interface ConversationLimits {
  /** Of one body that is held to be read. */
  readonly bodyBytes: number;
  /** From the stream's begin to the request's headers, and from these to the body's end. */
  readonly receiveMs: number;
  /** For the body to be understood and a worker to be found. */
  readonly waitMs: number;
  /** Between two messages of an answer, and of what the gateway takes from us. */
  readonly silenceMs: number;
  /** From its end on, for the gateway to read that; then the stream is reset. */
  readonly endMs: number;
}

export interface ConversationParts {
  readonly picker: Picker;
  readonly metrics: PickerMetrics;
  readonly held: HeldBytes;
  readonly limits: ConversationLimits;
  /** How bodies come from a gateway that does not say. */
  readonly bodyMode: BodySendMode;
  /** Of what is no gateway's doing: one line. */
  readonly onDefect: (id: string, error: unknown) => void;
}

type After = () => Promise<void> | undefined;

export class Conversation {
  readonly #call: ProcessCall;
  readonly #parts: ConversationParts;
  readonly #gone = new AbortController();
  readonly #out: Outgoing;
  readonly #body: HeldBody;
  readonly #answered: WatchedAnswer;
  #timer: NodeJS.Timeout;
  #requestMode: BodySendMode;
  #responseMode: BodySendMode;
  /** The gateway has said how it sends bodies. */
  #isModeSaid = false;
  #phase: 'start' | 'body' | 'picked' | 'ended' = 'start';
  #isFirst = true;
  #asked: Asked | undefined;
  #counted = false;

  constructor(call: ProcessCall, parts: ConversationParts) {
    this.#call = call;
    this.#parts = parts;
    this.#out = new Outgoing(call, () => this.#isOver());
    this.#body = new HeldBody(parts.held, parts.limits.bodyBytes);
    this.#answered = new WatchedAnswer(parts.metrics);
    this.#requestMode = parts.bodyMode;
    this.#responseMode = parts.bodyMode;
    this.#timer = setTimeout(() => this.#break('no request came'), parts.limits.receiveMs);
    call.on('data', (message: ProcessingRequest) => this.#receive(message));
    call.on('end', () => this.#end());
    call.on('cancelled', () => this.#end());
    call.on('error', () => this.#end());
    call.on('close', () => this.#end());
  }

  #receive(message: ProcessingRequest): void {
    if (this.#phase === 'ended') return;
    if (message.observabilityMode) {
      // The request goes its way without us: a status would cut it, where the gateway's failure mode is to refuse.
      if (this.#phase === 'start') this.#waitForAnswer();
      return;
    }
    let pending: Promise<void> | undefined;
    try {
      pending = this.#answer(message);
    } catch (error) {
      this.#fail(error);
      return;
    }
    if (this.#phase === 'picked') this.#timer.refresh();
    if (pending === undefined && !this.#call.writableNeedDrain) return;
    this.#call.pause();
    Promise.resolve(pending)
      .then(() => this.#out.drained())
      .then(
        () => this.#call.resume(),
        (error: unknown) => this.#fail(error),
      );
  }

  #answer({ request, metadataContext, protocolConfig }: ProcessingRequest): Promise<void> | undefined {
    if (this.#isFirst && protocolConfig !== undefined) {
      this.#requestMode = protocolConfig.requestBodyMode;
      this.#responseMode = protocolConfig.responseBodyMode;
      this.#isModeSaid = true;
    }
    this.#isFirst = false;
    switch (request?.$case) {
      case 'requestHeaders':
        return this.#onRequestHeaders(request.value, metadataContext);
      case 'requestBody':
        return this.#onRequestBody(request.value);
      case 'requestTrailers':
        return this.#onRequestTrailers();
      case 'responseHeaders':
        return this.#onResponseHeaders(request.value, metadataContext);
      case 'responseBody':
        return this.#onResponseBody(request.value);
      case 'responseTrailers':
        this.#answered.ended();
        return this.#out.send(goesOn('responseTrailers'));
      default:
        throw outOfOrder('a message without a request');
    }
  }

  #onRequestHeaders(headers: HttpHeaders, metadata: Metadata): Promise<void> | undefined {
    if (this.#phase !== 'start') throw outOfOrder('request headers twice');
    this.#phase = 'body';
    this.#asked = askedOf(headers, metadata);
    if (headers.endOfStream) return this.#choose('requestHeaders', { why: 'no_body' });
    switch (this.#requestMode) {
      case BodySendMode.FULL_DUPLEX_STREAMED:
        this.#patience(this.#parts.limits.receiveMs, () => this.#refuse(bodyStalled()));
        return undefined;
      case BodySendMode.BUFFERED:
      case BodySendMode.BUFFERED_PARTIAL:
        this.#patience(this.#parts.limits.receiveMs, () => this.#refuse(bodyStalled()));
        return this.#out.send(headersGoOn());
      default:
        return this.#choose('requestHeaders', { why: 'not_sent' });
    }
  }

  #onRequestBody({ body, endOfStream }: HttpBody): Promise<void> | undefined {
    const isDuplex = this.#requestMode === BodySendMode.FULL_DUPLEX_STREAMED;
    if (this.#phase === 'start') throw outOfOrder('a body before its headers');
    if (this.#phase !== 'body') {
      return isDuplex
        ? this.#out.sendAll(sentBack('requestBody', body, endOfStream))
        : this.#out.send(goesOn('requestBody'));
    }
    const isRead = this.#body.hold(body);
    if (isDuplex && isRead && !endOfStream) return undefined;
    const { pieces } = this.#body;
    if (isDuplex && !isRead) pieces.push(body);
    const part = isDuplex ? 'requestHeaders' : 'requestBody';
    const after = () => (isDuplex ? this.#giveBack(pieces, endOfStream) : undefined);
    if (isRead) return this.#choose(part, pieces, after);
    return this.#chooseUnread(part, isDuplex ? pieces : [...pieces, body], after);
  }

  /** What nobody has counted of a body is not kept while a worker is waited for: only what it names. */
  async #chooseUnread(part: RequestPart, pieces: readonly Buffer[], after: After): Promise<void> {
    let model: string | undefined;
    try {
      model = await this.#parts.picker.modelIn(this.#asked!, pieces, this.#gone.signal);
    } catch (error) {
      if (!this.#isOver()) throw error;
    }
    return this.#isOver() ? undefined : this.#choose(part, { why: 'too_large', model }, after);
  }

  #onRequestTrailers(): Promise<void> | undefined {
    if (this.#phase === 'start') throw outOfOrder('trailers before their headers');
    if (this.#phase !== 'body') return this.#out.send(goesOn('requestTrailers'));
    if (this.#requestMode !== BodySendMode.FULL_DUPLEX_STREAMED)
      return this.#choose('requestTrailers', { why: 'not_sent' });
    const { pieces } = this.#body;
    return this.#choose('requestHeaders', pieces, async () => {
      await this.#giveBack(pieces, false);
      await this.#out.send(goesOn('requestTrailers'));
    });
  }

  #onResponseHeaders(headers: HttpHeaders, metadata: Metadata): Promise<void> | undefined {
    this.#letRequestGo();
    const isAll = headers.endOfStream || this.#responseMode === BodySendMode.NONE;
    this.#answered.headers(headers, metadata, isAll, this.#isModeSaid);
    if (headers.endOfStream) this.#answered.ended();
    return this.#out.send(goesOn('responseHeaders'));
  }

  #onResponseBody({ body, endOfStream }: HttpBody): Promise<void> | undefined {
    this.#letRequestGo();
    this.#answered.body(body);
    if (endOfStream) this.#answered.ended();
    if (this.#responseMode !== BodySendMode.FULL_DUPLEX_STREAMED) return this.#out.send(goesOn('responseBody'));
    return this.#out.sendAll(sentBack('responseBody', body, endOfStream));
  }

  /** The gateway has an answer already, of its own: nothing is to be chosen any more. */
  #letRequestGo(): void {
    if (this.#phase !== 'body' && this.#phase !== 'start') return;
    this.#phase = 'picked';
    this.#body.release();
    this.#count('cancelled');
    this.#waitForAnswer();
  }

  /** `after`: what follows the answer to `part`. */
  async #choose(part: RequestPart, body: BodyOrWhy, after?: After): Promise<void> {
    const { picker, limits, metrics } = this.#parts;
    const began = performance.now();
    this.#patience(limits.waitMs, () => this.#gone.abort(saturated(`No worker within ${limits.waitMs / 1_000} s.`)));
    let found: Picked;
    try {
      found = await picker.pick(this.#asked!, body, this.#body.bytes, this.#gone.signal);
      if (this.#gone.signal.aborted) {
        found.share.ended();
        throw this.#gone.signal.reason;
      }
      this.#answered.isOf(found);
    } catch (error) {
      if (this.#isOver()) return;
      this.#refuse(error);
      return;
    }
    metrics.seconds.observe((performance.now() - began) / 1_000);
    this.#phase = 'picked';
    this.#count('picked');
    this.#waitForAnswer();
    await this.#out.send(picked(part, found.endpoints, found.prefiller));
    await after?.();
    this.#body.release();
  }

  async #giveBack(pieces: readonly Buffer[], isWhole: boolean): Promise<void> {
    if (pieces.length === 0 && isWhole) await this.#out.sendAll(sentBack('requestBody', Buffer.alloc(0), true));
    for (const [at, piece] of pieces.entries()) {
      await this.#out.sendAll(sentBack('requestBody', piece, isWhole && at === pieces.length - 1));
      if (this.#isOver()) return;
    }
  }

  #isOver(): boolean {
    return this.#phase === 'ended';
  }

  #patience(ms: number, expired: () => void): void {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(expired, ms);
  }

  /** An answer may take long; a gateway that tells nothing of it for so long is let go, without harm to the answer. */
  #waitForAnswer(): void {
    this.#patience(this.#parts.limits.silenceMs, () => this.#end());
  }

  /** The client's answer is our refusal, and the stream ends. */
  #refuse(why: unknown): void {
    const refusal = refusalOf(why);
    if (refusal.outcome === 'failed') this.#parts.onDefect(this.#asked?.id ?? '', why);
    this.#count(refusal.outcome);
    this.#call.write(refused(refusal));
    this.#end();
  }

  /** The stream ends with a status: what the gateway does then is its failure mode. */
  #fail(error: unknown): void {
    if (this.#isOver()) return;
    if (!(error instanceof KvError)) this.#parts.onDefect(this.#asked?.id ?? '', error);
    this.#count('failed');
    this.#call.emit(
      'error',
      error instanceof OutOfOrder ? { code: status.INVALID_ARGUMENT, details: error.message } : toStatus(error),
    );
  }

  #break(why: string): void {
    this.#fail(new KvError('DEADLINE', `endpoint picker: ${why} in time; the stream was ended`));
  }

  #count(outcome: Outcome): void {
    if (this.#counted) return;
    this.#counted = true;
    this.#parts.metrics.count(outcome);
  }

  /** Whatever it was doing. */
  #end(): void {
    if (this.#isOver()) return;
    const wasOpen = this.#phase === 'body';
    this.#phase = 'ended';
    clearTimeout(this.#timer);
    if (wasOpen) this.#count('cancelled');
    this.#gone.abort(new KvError('CANCELLED', 'the gateway ended the stream'));
    this.#answered.left();
    this.#body.release();
    this.#call.end();
    this.#call.resume(); // what still comes is nobody's
    if (this.#call.closed) return;
    const reset = setTimeout(() => resetCall(this.#call as never), this.#parts.limits.endMs);
    this.#call.once('close', () => clearTimeout(reset));
  }
}

class OutOfOrder extends KvError {
  constructor(what: string) {
    super('REQUEST', `ext_proc: ${what}; see what the gateway sends`);
  }
}

const outOfOrder = (what: string): KvError => new OutOfOrder(what);
const bodyStalled = (): Error => stalled('The body did not arrive in time.');

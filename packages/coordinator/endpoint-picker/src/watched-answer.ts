/**
 * An answer as the gateway tells of it: who gave it, when its first token came, its usage. The request's share of a worker's load ends with it,
 * exactly once. What it says of the pod its status tells, and of a stream of events that the gateway has said to show its first one: one
 * that is left before then says nothing.
 *
 * Invariant: of an answer some KiB are kept, of its end and of one event at its beginning.
 */
import { AnswerTail, outcomeOf, StartReader } from '@kvtier/registry';
import type { HttpHeaders } from '@kvtier/wire/ext-proc';
import { headersOf, type Metadata, servedOf } from './asked.ts';
import type { PickerMetrics } from './metrics.ts';
import type { Picked } from './picker.ts';

/** Of a gateway whose own deadline ends an answer that is long in coming. */
const routeTimedOut = '504';
/** Of an event that has not come whole: an error is shorter. */
const mostEventBytes = 4_096;
const answerHeaders = new Set([':status', 'content-encoding', 'content-type']);

export class WatchedAnswer {
  readonly #metrics: PickerMetrics;
  readonly #tail = new AnswerTail();
  #picked: Picked | undefined;
  #isGood = false;
  /** Of the one that was chosen. */
  #isTheirs = false;
  #usageIsRead = false;
  /** What it says of the pod has been told. */
  #isJudged = false;
  /** An answer that comes as events, none of which has come: its body begins with its first token. */
  #isStreamed = false;
  /** Of one that can be read, until it says what it is; and who wants to know how it failed, or that it did not. */
  #start: StartReader | undefined;
  #began: (failure: string | undefined) => void = () => {};

  constructor(metrics: PickerMetrics) {
    this.#metrics = metrics;
  }

  /** Who is to give it. Without, nobody of ours was asked. */
  isOf(picked: Picked): void {
    this.#picked = picked;
  }

  /** `isAll`: nothing else will be seen of it but its end. `isShown`: its gateway has said that its body will be. */
  headers(headers: HttpHeaders, metadata: Metadata, isAll: boolean, isShown: boolean): void {
    const told = headersOf(headers, answerHeaders);
    const served = servedOf(metadata);
    const isElsewhere = served !== undefined && served !== this.#picked?.endpoint;
    if (this.#picked && isElsewhere) {
      this.#metrics.elsewhere.inc();
      this.#picked.share.ended(); // the one that was chosen does not have it
    }
    const status = told.get(':status') ?? '200';
    this.#isGood = /^2\d\d$/.test(status);
    const isPlain = (told.get('content-encoding') ?? 'identity') === 'identity';
    this.#usageIsRead = this.#isGood && isPlain;
    this.#isStreamed = this.#isGood && /^text\/event-stream\b/i.test(told.get('content-type') ?? '');
    this.#isTheirs = this.#isGood && !isElsewhere; // what is not good may be the gateway's own word
    if (this.#isTheirs) this.#picked?.heard();
    if (this.#isStreamed && isPlain && !isAll && !this.#isJudged) this.#start = new StartReader(mostEventBytes);
    if (this.#picked) this.#judge(this.#picked, status, served, isShown);
    if (isAll) this.#firstToken(false);
  }

  body(body: Buffer): void {
    if (body.length > 0) this.#read(body);
    if (body.length > 0 && this.#isTheirs) this.#picked?.heard();
    if (this.#usageIsRead) this.#tail.push(body);
  }

  /** Whole. */
  ended(): void {
    const usage = this.#usageIsRead ? this.#tail.usage() : undefined;
    this.#usageIsRead = false;
    if (this.#start) this.#began(undefined);
    this.#start = undefined;
    this.#picked?.share.ended(usage?.completionTokens);
    if (usage) this.#metrics.countUsage(usage);
  }

  /** Whatever became of it. */
  left(): void {
    this.#start = undefined;
    this.#picked?.share.ended();
  }

  /**
   * Once. What may be the gateway's own word, or says that it went elsewhere after a failure, is no more than a doubt; a refusal says
   * nothing. `served`: the gateway's choice, which it has made before it knows whether it can connect.
   */
  #judge({ judgement, endpoint, isAlone }: Picked, status: string, served: string | undefined, isShown: boolean): void {
    if (this.#isJudged) return;
    this.#isJudged = true;
    const isTheirs = served === endpoint || (served === undefined && isAlone);
    const isFailure = /^5\d\d$/.test(status);
    if (served !== undefined && !isTheirs) judgement.doubted();
    else if (this.#start && isShown)
      this.#began = (failure) => {
        if (failure !== undefined && isTheirs) judgement.failed(`a stream behind a gateway ${failure}`);
        else if (failure !== undefined) judgement.doubted();
        else if (isTheirs) judgement.succeeded();
      };
    else if (this.#isGood && isTheirs) judgement.succeeded();
    else if (isFailure && served !== undefined && status !== routeTimedOut)
      judgement.failed(`a gateway was answered ${status}`);
    else if (isFailure) judgement.doubted();
  }

  #read(body: Buffer): void {
    const verdict = this.#start?.push(body);
    if (verdict === undefined) {
      if (this.#start === undefined || this.#start.hasEvent) this.#firstToken(this.#isStreamed);
      return;
    }
    this.#start = undefined;
    const outcome = outcomeOf(verdict);
    if (outcome) this.#began(outcome.failure);
    this.#isGood = outcome !== undefined && outcome.failure === undefined;
    this.#firstToken(this.#isStreamed);
  }

  #firstToken(isTimed: boolean): void {
    if (!this.#isGood) return;
    this.#picked?.share.firstToken(isTimed);
    if (isTimed && this.#isTheirs) this.#picked?.came();
    this.#isStreamed = false;
  }
}

/**
 * An answer as the gateway tells of it: who gave it, when its first token came, its usage. The request's share of a worker's load ends with it,
 * exactly once.
 */
import { AnswerTail } from '@kvtier/registry';
import type { HttpHeaders } from '@kvtier/wire/ext-proc';
import { headersOf, type Metadata, servedOf } from './asked.ts';
import type { PickerMetrics } from './metrics.ts';
import type { Picked } from './picker.ts';

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

  constructor(metrics: PickerMetrics) {
    this.#metrics = metrics;
  }

  /** Who is to give it. Without, nobody of ours was asked. */
  isOf(picked: Picked): void {
    this.#picked = picked;
  }

  /** `isAll`: nothing else will be seen of it but its end. */
  headers(headers: HttpHeaders, metadata: Metadata, isAll: boolean): void {
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
    if (!isElsewhere && this.#picked) this.#judge(this.#picked, status, served !== undefined);
    if (isAll) this.#firstToken(false);
  }

  body(body: Buffer): void {
    if (body.length > 0) this.#firstToken(this.#isStreamed);
    if (body.length > 0 && this.#isTheirs) this.#picked?.heard();
    if (this.#usageIsRead) this.#tail.push(body);
  }

  /** Whole. */
  ended(): void {
    const usage = this.#usageIsRead ? this.#tail.usage() : undefined;
    this.#usageIsRead = false;
    this.#picked?.share.ended(usage?.completionTokens);
    if (usage) this.#metrics.countUsage(usage);
  }

  /** Whatever became of it. */
  left(): void {
    this.#picked?.share.ended();
  }

  /** `isKnown`: it was sent to the pod. Else a failure may be the gateway's own word. A refusal says nothing. */
  #judge(picked: Picked, status: string, isKnown: boolean): void {
    if (this.#isJudged) return;
    this.#isJudged = true;
    if (this.#isGood) picked.succeeded();
    else if (!/^5\d\d$/.test(status)) return;
    else if (isKnown) picked.failed(`a gateway was answered ${status}`);
    else picked.doubted();
  }

  #firstToken(isTimed: boolean): void {
    if (!this.#isGood) return;
    this.#picked?.share.firstToken(isTimed);
    if (isTimed && this.#isTheirs) this.#picked?.came();
    this.#isStreamed = false;
  }
}

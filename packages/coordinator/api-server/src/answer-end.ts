/**
 * How a pod's answer ends: its `usage` is counted where it came whole, and a stream of events that its pod does not finish gets a last one,
 * as our own workers' streams do. Nothing of the answer waits for it.
 */
import type { KvError } from '@kvtier/errors';
import { AnswerTail, type Usage } from '@kvtier/registry';
import type { Forwarded } from './engines.ts';
import { toHttpError } from './errors.ts';

export const isOfEvents = ({ headers }: Forwarded): boolean =>
  /^text\/event-stream\b/i.test(String(headers['content-type'] ?? ''));

const [space, closingBracket] = [0x20, 0x5d];

export class AnswerEnd {
  readonly #tail = new AnswerTail();
  /** 200, and bytes that say what they seem to. */
  readonly #isRead: boolean;
  readonly #isStream: boolean;
  readonly #counted: (usage: Usage) => void;
  /** Its last bytes but blank ones may be those of [DONE]: of each piece only that is looked at, and not what is kept of all. */
  #mayBeDone = false;

  constructor(answer: Forwarded, counted: (usage: Usage) => void) {
    this.#isRead = answer.status === 200 && (answer.headers['content-encoding'] ?? 'identity') === 'identity';
    this.#isStream = this.#isRead && isOfEvents(answer);
    this.#counted = counted;
  }

  push(piece: Buffer): void {
    if (!this.#isRead) return;
    this.#tail.push(piece);
    let last = piece.length - 1;
    while (last >= 0 && piece[last]! <= space) last--;
    if (last >= 0) this.#mayBeDone = piece[last] === closingBracket;
  }

  /** Of a stream: its client has all of it, whatever becomes of the connection. */
  isDone(): boolean {
    return this.#isStream && this.#mayBeDone && this.#tail.isDone();
  }

  /** It came whole. False: it is a stream that says itself that it failed. */
  cameWhole(): boolean {
    const usage = this.#isRead ? this.#tail.usage() : undefined;
    if (usage) this.#counted(usage);
    return !(this.#isStream && this.#tail.saysError());
  }

  /** What its client can still be told; undefined: nothing, in the middle of something. */
  lastEvent(failure: KvError): string | undefined {
    if (!this.#isStream || !this.#tail.isBetweenEvents()) return undefined;
    return `data: ${JSON.stringify(toHttpError(failure).body)}\n\n`;
  }
}

/**
 * The first token of a hand-off, from who has it first. The prefill side draws it at the end of the prompt; the decode side draws the same
 * one once it has the blocks, since what is drawn follows from seed and position alone, and it is not given again. Should the decode side
 * draw another one after all, its stream fails, and the answer goes on from what was given.
 *
 * Invariants: each token is given once, in order, and none before the one before it was taken; whoever reads the answer hears nothing
 * after its end.
 */
import { KvError } from '@kvtier/errors';
import type { OnEvent } from '@kvtier/registry';
import type { GenerateEvent } from '@kvtier/wire/grpc';

const over = new KvError('CANCELLED', 'the answer is over');

export class EarlyToken {
  readonly #requestId: string;
  readonly #onEvent: OnEvent;
  readonly #over = new AbortController();
  #given: number | undefined;
  /** While it is waited for that the token is taken. */
  #taken: Promise<void> | undefined;
  #givenMs = 0;
  #isFollowed = false;
  #pauseS: number | undefined;
  #isOver = false;

  constructor(requestId: string, onEvent: OnEvent) {
    this.#requestId = requestId;
    this.#onEvent = onEvent;
  }

  /** The prefill side's token was the first. */
  get isGiven(): boolean {
    return this.#given !== undefined;
  }

  /** Seconds from when it was given until the next one came; undefined: none has. */
  get pauseS(): number | undefined {
    return this.#pauseS;
  }

  /** It was the only one: it ended the answer, or whoever reads it has enough. */
  get isOver(): boolean {
    return this.#isOver;
  }

  /** Aborted when nothing of the decode side is wanted any more. */
  get signal(): AbortSignal {
    return this.#over.signal;
  }

  /** The hand-off has ended, however it did: what still waits is not told, the answer may go on elsewhere. */
  leave(): void {
    this.#over.abort(over);
  }

  /** The prefill side has drawn it, and the decode side has given none. Never throws. */
  give({ tokenIds, finishReason }: GenerateEvent): void | Promise<void> {
    if (this.#given !== undefined || this.signal.aborted) return undefined;
    this.#given = tokenIds[0]!;
    this.#givenMs = performance.now();
    const end = (more: unknown): void => {
      this.#taken = undefined;
      if (more !== false && finishReason === '') return;
      this.#isOver = true;
      this.#over.abort(over);
    };
    const failed = (error: unknown): void => this.#over.abort(error);
    try {
      const told = this.#onEvent({ tokenIds: [this.#given], finishReason, cache: undefined, failure: undefined });
      if (!(told instanceof Promise)) return end(told);
      this.#taken = told.then(end, failed);
    } catch (error) {
      failed(error);
    }
    return this.#taken;
  }

  /** What the decode side says, without the token that was given. @throws KvError DISCONNECTED (retry): it drew another one */
  pass(event: GenerateEvent): ReturnType<OnEvent> {
    const rest = this.#behind(event);
    if (this.#given !== undefined && rest.tokenIds.length > 0)
      this.#pauseS ??= (performance.now() - this.#givenMs) / 1_000;
    if (rest === event || this.#taken === undefined) return this.#onEvent(rest);
    // It may turn out to have been the only one, or the hand-off ends meanwhile.
    return this.#taken.then(() => (this.signal.aborted ? false : this.#onEvent(rest)));
  }

  #behind(event: GenerateEvent): GenerateEvent {
    if (this.#given === undefined || this.#isFollowed || event.tokenIds.length === 0) return event;
    this.#isFollowed = true;
    const [first, ...tokenIds] = event.tokenIds;
    if (first === this.#given) return { ...event, tokenIds };
    const drew = `the prefill worker drew token ${this.#given} first, the decode worker ${first}`;
    throw new KvError('DISCONNECTED', `request ${this.#requestId}: ${drew}`, { retry: true });
  }
}

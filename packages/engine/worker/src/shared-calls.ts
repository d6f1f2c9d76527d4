/**
 * Calls that carry many requests (GenerateMany). What the requests of a call are told in one turn goes out as one message.
 *
 * Invariants: what is not read is kept at most once for each token: while a call takes no more, tokens of one request join in one event. A
 * call that breaks, or says what cannot be, aborts its requests and no others.
 */
import { KvError } from '@kvtier/errors';
import {
  type GenerateEvent,
  type GenerateEvents,
  type GenerateOrder,
  type NumberedEvent,
  toStatus,
} from '@kvtier/wire/grpc';
import type { Generations } from './generations.ts';

/** The call, as far as it is used here. */
export interface ManyCall {
  write(events: GenerateEvents): boolean;
  end(): void;
  emit(event: 'error', error: unknown): boolean;
  on(event: 'data', listener: (order: GenerateOrder) => void): unknown;
  on(event: 'end' | 'cancelled' | 'drain', listener: () => void): unknown;
}

/** Of one message: it stays far below what gRPC takes. */
const mostEvents = 4_096;
const mostTokens = 262_144;
/** Of one event that others join. */
const mostJoined = 65_536;

export class SharedCalls {
  readonly #calls = new Set<SharedCall>();

  add(call: ManyCall, generations: Pick<Generations, 'begin'>): void {
    const shared = new SharedCall(call, generations, () => this.#calls.delete(shared));
    this.#calls.add(shared);
  }

  /** Each ends when its last request has. */
  close(): void {
    for (const call of this.#calls) call.finish();
  }
}

interface Request {
  abort: () => void;
  /** Its last event that is not sent yet, and which message that belongs to. */
  last: NumberedEvent | undefined;
  message: number;
}

class SharedCall {
  readonly #call: ManyCall;
  readonly #onOver: () => void;
  readonly #running = new Map<number, Request>();
  #lastNumber = -1;
  #unsent: NumberedEvent[] = [];
  /** Messages that were begun. */
  #messages = 0;
  #isDue = false;
  /** Its buffer is full. */
  #blocked = false;
  #finishing = false;
  #over = false;

  constructor(call: ManyCall, generations: Pick<Generations, 'begin'>, onOver: () => void) {
    this.#call = call;
    this.#onOver = onOver;
    call.on('data', (order) => this.#take(order, generations));
    call.on('end', () => this.finish());
    call.on('cancelled', () => this.#break());
    call.on('drain', () => {
      this.#blocked = false;
      this.#send();
    });
  }

  finish(): void {
    this.#finishing = true;
    this.#send();
  }

  #take({ number, begin }: GenerateOrder, generations: Pick<Generations, 'begin'>): void {
    if (this.#over) return;
    if (begin === undefined) {
      this.#running.get(number)?.abort();
      this.#running.delete(number);
      if (this.#finishing) this.#send();
      return;
    }
    if (number <= this.#lastNumber) {
      this.#break();
      const order = `engine: request ${number} begins after ${this.#lastNumber}; numbers of one call must grow`;
      this.#call.emit('error', toStatus(new KvError('PROTOCOL', order)));
      return;
    }
    this.#lastNumber = number;
    const request: Request = { abort: () => {}, last: undefined, message: -1 };
    this.#running.set(number, request);
    request.abort = generations.begin(begin, (event, isLast) => {
      if (isLast) this.#running.delete(number);
      this.#tell(number, request, event);
    });
  }

  #tell(number: number, request: Request, event: GenerateEvent): void {
    if (this.#over) return;
    const last = request.message === this.#messages ? request.last?.event : undefined;
    if (last && joins(last, event)) {
      for (const id of event.tokenIds) last.tokenIds.push(id);
      last.finishReason = event.finishReason;
    } else {
      request.last = { number, event };
      request.message = this.#messages;
      this.#unsent.push(request.last);
    }
    if (this.#isDue) return;
    this.#isDue = true;
    // After all that this turn has for others.
    queueMicrotask(() => {
      this.#isDue = false;
      this.#send();
    });
  }

  #send(): void {
    if (this.#over) return;
    while (!this.#blocked && this.#unsent.length > 0) {
      this.#messages++;
      this.#blocked = !this.#call.write({ events: this.#nextEvents() });
    }
    if (!this.#finishing || this.#running.size > 0 || this.#unsent.length > 0) return;
    this.#over = true;
    this.#onOver();
    this.#call.end();
  }

  #nextEvents(): NumberedEvent[] {
    let tokens = 0;
    let count = 0;
    while (count < this.#unsent.length && count < mostEvents && tokens < mostTokens)
      tokens += this.#unsent[count++]!.event!.tokenIds.length;
    const rest = count === this.#unsent.length ? [] : this.#unsent.splice(count);
    const events = this.#unsent;
    this.#unsent = rest;
    return events;
  }

  #break(): void {
    if (this.#over) return;
    this.#over = true;
    this.#unsent = [];
    for (const { abort } of this.#running.values()) abort();
    this.#running.clear();
    this.#onOver();
  }
}

/** Tokens behind tokens, and nothing else to say but how they end. */
const joins = (last: GenerateEvent, event: GenerateEvent): boolean =>
  event.cache === undefined &&
  event.failure === undefined &&
  event.handOff === undefined &&
  last.failure === undefined &&
  last.tokenIds.length + event.tokenIds.length <= mostJoined;

/**
 * One call to an engine worker that carries many requests (GenerateMany): what an engine has for all of them after a step is one message,
 * where a call for each would be a message, a frame and a turn of two libraries for each.
 *
 * Invariants: a request is told its events in their order, until the last one, its failure, or until it is left; nothing is told in `begin`
 * itself. One that takes no more for now holds no other: its events wait here, tokens joined, as many as were asked for; an engine that says
 * more is told no more of, and that request fails. The call breaks: what has come is told, and the failure to all that are left.
 */
import type { ClientDuplexStream } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import type { GenerateEvent, GenerateEvents, GenerateOrder, GenerateRequest, NumberedEvent } from '@kvtier/wire/grpc';

/** Who is told of a request. */
export interface Told {
  event(event: GenerateEvent): void;
  failed(error: unknown): void;
}

/** A request under way. */
export interface Underway {
  /** Nothing more is told. `answered`: its last event was. */
  leave(answered: boolean): void;
  pause(): void;
  resume(): void;
}

/**
 * What one turn tells of; others get their turn in between. As many as an engine runs: with fewer, answers that end here are asked for anew
 * in the midst of a step's tokens, and everything comes later.
 */
const mostPerTurn = 128;
/** What may wait for a turn; beyond it nothing more is read. */
const mostWaiting = 1_024;
/** Longer ones hold up whatever begins after them. */
const mostPromptTokens = 65_536;
const mostStopTokens = 4_096;
const mostTextChars = 4_096;
/** Beside those with tokens. */
const mostOtherEvents = 1_024;

interface Request {
  readonly told: Told;
  /** Its first event has come. */
  hasBegun: boolean;
  paused: boolean;
  left: boolean;
  readonly waiting: GenerateEvent[];
  /** Tokens and events that may still wait. */
  room: number;
}

const textChars = ({ requestId, cacheSalt, loraName, traceparent = '' }: GenerateRequest): number =>
  requestId.length + cacheSalt.length + loraName.length + traceparent.length;

/** One that cannot be written must not break the call for others; what it costs to find out is its own call's. */
export const mayShare = (request: GenerateRequest): boolean =>
  request.promptTokenIds.length <= mostPromptTokens &&
  request.stopTokenIds.length <= mostStopTokens &&
  textChars(request) <= mostTextChars &&
  (request.seed === undefined || BigInt.asUintN(64, request.seed) === request.seed);

export class SharedCall {
  readonly #call: ClientDuplexStream<GenerateOrder, GenerateEvents>;
  readonly #requests = new Map<number, Request>();
  #lastNumber = 0;
  /** What has come and is not told yet: the first events of requests, which are told before all others, and the rest. */
  readonly #firsts = new Waiting();
  readonly #rest = new Waiting();
  /** First events that are told yet before the next turn. */
  #firstsLeft = 0;
  #telling: NodeJS.Immediate | undefined;
  #isPaused = false;
  #broken = false;

  /** `failureOf`: what its end means to who is not answered yet. `onBroken` is called once. */
  constructor(
    call: ClientDuplexStream<GenerateOrder, GenerateEvents>,
    failureOf: (error: unknown) => unknown,
    onBroken: () => void,
  ) {
    this.#call = call;
    const broke = (error: unknown): void => {
      if (this.#broken) return;
      this.#broken = true;
      onBroken();
      for (const waiting of [this.#firsts, this.#rest]) this.#tell(waiting, waiting.size);
      this.#failAll(failureOf(error));
    };
    call.on('error', broke);
    call.on('status', broke);
    call.on('data', ({ events }: GenerateEvents) => {
      for (const event of events) this.#take(event);
      if (this.#telling === undefined) this.#tellSome();
      else this.#firstsLeft -= this.#tell(this.#firsts, this.#firstsLeft);
    });
  }

  get broken(): boolean {
    return this.#broken;
  }

  /** Not when it is broken. */
  begin(request: GenerateRequest, told: Told): Underway {
    const number = ++this.#lastNumber;
    const room = request.maxTokens + mostOtherEvents;
    const own: Request = { told, hasBegun: false, paused: false, left: false, waiting: [], room };
    this.#requests.set(number, own);
    this.#call.write({ number, begin: request });
    return {
      leave: (answered) => {
        if (own.left) return;
        own.left = true;
        own.waiting.length = 0;
        // The engine says the last word once; what is on its way to one that has left is passed by.
        if (this.#requests.delete(number) && !answered && !this.#broken) this.#call.write({ number });
      },
      pause: () => {
        own.paused = true;
      },
      resume: () => {
        own.paused = false;
        while (!own.paused && !own.left && own.waiting.length > 0) {
          const event = own.waiting.shift()!;
          own.room += event.tokenIds.length + 1;
          told.event(event);
        }
      },
    };
  }

  /** All its requests fail with this, and the engine aborts them. */
  cut(why: unknown): void {
    if (!this.#broken) {
      this.#broken = true;
      this.#call.cancel();
    }
    this.#firsts.drop();
    this.#rest.drop();
    this.#failAll(why);
  }

  #failAll(why: unknown): void {
    clearImmediate(this.#telling);
    const left = [...this.#requests.values()];
    this.#requests.clear();
    for (const { told } of left) told.failed(why);
  }

  #take(numbered: NumberedEvent): void {
    const request = this.#requests.get(numbered.number);
    if (request === undefined) return;
    (request.hasBegun ? this.#rest : this.#firsts).add(numbered);
    request.hasBegun = true;
  }

  readonly #tellSome = (): void => {
    this.#telling = undefined;
    const told = this.#tell(this.#firsts, mostPerTurn);
    this.#tell(this.#rest, mostPerTurn - told);
    const left = this.#firsts.size + this.#rest.size;
    const isPaused = left > mostWaiting;
    if (isPaused && !this.#isPaused) this.#call.pause();
    if (!isPaused && this.#isPaused) this.#call.resume();
    this.#isPaused = isPaused;
    this.#firstsLeft = mostPerTurn;
    if (left > 0) this.#telling = setImmediate(this.#tellSome);
  };

  /** So many of them at most. @returns how many */
  #tell(waiting: Waiting, most: number): number {
    let told = 0;
    for (; told < most && waiting.size > 0; told++) {
      const { number, event } = waiting.next();
      const request = this.#requests.get(number);
      if (request === undefined || event === undefined) continue;
      if (!request.paused && request.waiting.length === 0) request.told.event(event);
      else if (!keep(request, event)) {
        const why = 'engine: gave more tokens than were asked for; run workers and coordinator of one version';
        request.told.failed(new KvError('PROTOCOL', why));
      }
    }
    return told;
  }
}

/** Events in the order they came in. */
class Waiting {
  #events: NumberedEvent[] = [];
  #at = 0;

  get size(): number {
    return this.#events.length - this.#at;
  }

  add(event: NumberedEvent): void {
    this.#events.push(event);
  }

  /** Not when it is empty. */
  next(): NumberedEvent {
    const next = this.#events[this.#at++]!;
    if (this.#at === this.#events.length) this.drop();
    else if (this.#at === mostWaiting) {
      this.#events = this.#events.slice(mostWaiting);
      this.#at = 0;
    }
    return next;
  }

  drop(): void {
    this.#events = [];
    this.#at = 0;
  }
}

/** False: there is no room for it. */
function keep(request: Request, event: GenerateEvent): boolean {
  const { waiting } = request;
  const last = waiting.at(-1);
  const isPlain = event.cache === undefined && event.handOff === undefined && event.failure === undefined;
  if (last === undefined || !isPlain || last.failure !== undefined) {
    request.room -= event.tokenIds.length + 1;
    if (request.room < 0) return false;
    waiting.push(event);
    return true;
  }
  request.room -= event.tokenIds.length;
  if (request.room < 0) return false;
  for (const id of event.tokenIds) last.tokenIds.push(id);
  last.finishReason = event.finishReason;
  return true;
}

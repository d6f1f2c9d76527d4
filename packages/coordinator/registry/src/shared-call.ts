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

/** What one turn tells of; others get their turn in between. */
const mostPerTurn = 128;
/** Longer ones hold up whatever begins after them. */
const mostPromptTokens = 65_536;
const mostStopTokens = 4_096;
const mostTextChars = 4_096;
/** Beside those with tokens. */
const mostOtherEvents = 1_024;

interface Request {
  readonly told: Told;
  paused: boolean;
  left: boolean;
  readonly waiting: GenerateEvent[];
  /** Tokens and events that may still wait. */
  room: number;
}

/** One that cannot be written must not break the call for others; what it costs to find out is its own call's. */
export const mayShare = (request: GenerateRequest): boolean =>
  request.promptTokenIds.length <= mostPromptTokens &&
  request.stopTokenIds.length <= mostStopTokens &&
  request.requestId.length + request.cacheSalt.length + request.loraName.length <= mostTextChars &&
  (request.seed === undefined || BigInt.asUintN(64, request.seed) === request.seed);

export class SharedCall {
  readonly #call: ClientDuplexStream<GenerateOrder, GenerateEvents>;
  readonly #requests = new Map<number, Request>();
  #lastNumber = 0;
  /** What has come and is not told yet, from `#at` on. */
  #come: NumberedEvent[] = [];
  #at = 0;
  #telling: NodeJS.Immediate | undefined;
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
      this.#tell(Number.POSITIVE_INFINITY);
      this.#failAll(failureOf(error));
    };
    call.on('error', broke);
    call.on('status', broke);
    call.on('data', ({ events }: GenerateEvents) => {
      for (const event of events) this.#come.push(event);
      if (this.#telling === undefined) this.#tellSome();
    });
  }

  get broken(): boolean {
    return this.#broken;
  }

  /** Not when it is broken. */
  begin(request: GenerateRequest, told: Told): Underway {
    const number = ++this.#lastNumber;
    const room = request.maxTokens + mostOtherEvents;
    const own: Request = { told, paused: false, left: false, waiting: [], room };
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
    this.#come = [];
    this.#failAll(why);
  }

  #failAll(why: unknown): void {
    clearImmediate(this.#telling);
    const left = [...this.#requests.values()];
    this.#requests.clear();
    for (const { told } of left) told.failed(why);
  }

  readonly #tellSome = (): void => {
    this.#telling = undefined;
    this.#tell(mostPerTurn);
    if (this.#at === this.#come.length) {
      this.#come = [];
      this.#at = 0;
      this.#call.resume();
      return;
    }
    this.#call.pause();
    this.#telling = setImmediate(this.#tellSome);
  };

  #tell(most: number): void {
    for (let told = 0; told < most && this.#at < this.#come.length; told++) {
      const { number, event } = this.#come[this.#at++]!;
      const request = this.#requests.get(number);
      if (request === undefined || event === undefined) continue;
      if (!request.paused && request.waiting.length === 0) request.told.event(event);
      else if (!keep(request, event)) {
        const why = 'engine: gave more tokens than were asked for; run workers and coordinator of one version';
        request.told.failed(new KvError('PROTOCOL', why));
      }
    }
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

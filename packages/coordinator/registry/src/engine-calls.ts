/**
 * Calls to one engine worker (gRPC): requests with their streams of tokens, by one call for all or one for each, and the stream of its load;
 * with the short questions (engine-questions.ts).
 *
 * Invariants: every wait has a deadline; a call that its caller no longer wants is cancelled, which frees its blocks.
 */
import { type ClientReadableStream, status } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import {
  type Description,
  type EngineLoad,
  fromFailure,
  fromStatus,
  type GenerateEvent,
  type GenerateRequest,
} from '@kvtier/wire/grpc';
import { EngineQuestions, type EngineQuestionsOptions } from './engine-questions.ts';
import { mayShare, SharedCall, type Told, type Underway } from './shared-call.ts';

/** What one event of an answer is told to, which waits for a promise; false, or a promise of it: no more is wanted. */
export type OnEvent = (event: GenerateEvent) => unknown;

export interface EngineCallsOptions extends EngineQuestionsOptions {
  /** A running request without any event for so long is given up. */
  readonly silenceDeadlineMs?: number;
}

export class EngineCalls extends EngineQuestions {
  readonly #silenceDeadlineMs: number;
  /** Whether the engine takes many requests by one call, as it last said. */
  #sharesCalls = false;
  #shared: SharedCall | undefined;
  /** Ends a running request, with a reason. */
  readonly #cuts = new Set<(why: KvError) => void>();

  constructor(options: EngineCallsOptions) {
    super(options);
    this.#silenceDeadlineMs = options.silenceDeadlineMs ?? 600_000;
  }

  /** Connections so far. */
  get connections(): number {
    return this.clients.opened;
  }

  /** Requests under way. */
  get running(): number {
    return this.#cuts.size;
  }

  /**
   * One request; its events as they come. Ends after the event with a finish reason.
   * Leaving the loop, or `signal`, cancels the call. @throws KvError, or the reason of `signal`
   */
  async *generate(request: GenerateRequest, signal: AbortSignal): AsyncGenerator<GenerateEvent, void, void> {
    if (signal.aborted) throw signal.reason;
    const connection = this.clients.begin();
    const call: ClientReadableStream<GenerateEvent> = connection.client.generate(request);
    call.on('error', ignore); // the loop below reports it; one that comes after the loop was left has nobody to tell
    const cancel = (): void => call.cancel();
    signal.addEventListener('abort', cancel, { once: true });
    let ended: KvError | undefined;
    const cut = (why: KvError): void => {
      ended ??= why;
      call.cancel();
    };
    this.#cuts.add(cut);
    let answered = false;
    call.once('status', ({ code }) => this.clients.end(connection, code === status.CANCELLED));
    const watchdog = setTimeout(() => {
      const waited = `no token for ${this.#silenceDeadlineMs / 1000} s; the request was given up`;
      cut(new KvError('DEADLINE', `engine: ${waited}`));
    }, this.#silenceDeadlineMs);
    try {
      for await (const event of call.iterator({ destroyOnReturn: false }) as AsyncIterable<GenerateEvent>) {
        watchdog.refresh();
        answered = event.failure !== undefined || event.finishReason !== '';
        if (event.failure) throw fromFailure(event.failure);
        yield event;
        if (answered) return;
      }
      throw new KvError('PROTOCOL', `engine at ${this.address}: the answer ended without a finish reason; see its log`);
    } catch (error) {
      if (signal.aborted) throw signal.reason;
      throw ended ?? this.describeFailure(fromStatus(error));
    } finally {
      clearTimeout(watchdog);
      this.#cuts.delete(cut);
      signal.removeEventListener('abort', cancel);
      if (answered) this.#awaitStatus(call);
      else call.cancel(); // of no effect on a call that has ended
    }
  }

  /**
   * One request: `onEvent` is told each event as it comes, and what it returns is waited for before the next one; false ends the
   * call. Without promises of our own for each token: a thousand streams of tokens are the coordinator's work. Resolves after the event with a
   * finish reason, or false. `signal` cancels the call. @throws KvError, what `onEvent` threw, or the reason of `signal`
   */
  follow(request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void> {
    if (signal.aborted) return Promise.reject(signal.reason as Error);
    return new Promise((resolve, reject) => {
      let over = false;
      let answered = false;
      const end = (failure: unknown): void => {
        if (over) return;
        over = true;
        clearTimeout(watchdog);
        this.#cuts.delete(cut);
        signal.removeEventListener('abort', cancel);
        underway.leave(answered);
        if (signal.aborted) reject(signal.reason as Error);
        else if (failure === undefined) resolve();
        else reject(failure as Error);
      };
      const cut = (why: KvError): void => end(why);
      const cancel = (): void => end(signal.reason);
      const told = (goesOn: unknown): void => {
        if (goesOn === false || answered) end(undefined);
      };
      const watchdog = setTimeout(() => {
        const waited = `no token for ${this.#silenceDeadlineMs / 1000} s; the request was given up`;
        end(new KvError('DEADLINE', `engine: ${waited}`));
      }, this.#silenceDeadlineMs);
      this.#cuts.add(cut);
      signal.addEventListener('abort', cancel, { once: true });
      const underway = this.#begin(request, {
        failed: end,
        event: (event) => {
          if (over) return;
          watchdog.refresh();
          answered = event.failure !== undefined || event.finishReason !== '';
          try {
            if (event.failure) throw fromFailure(event.failure);
            const waits = onEvent(event);
            if (!(waits instanceof Promise)) return told(waits);
            underway.pause();
            waits.then((goesOn) => {
              told(goesOn);
              if (!over) underway.resume();
            }, end);
          } catch (error) {
            end(error);
          }
        },
      });
    });
  }

  #begin(request: GenerateRequest, told: Told): Underway {
    if (!this.#sharesCalls || !mayShare(request)) return this.#ownCall(request, told);
    this.#shared ??= this.#sharedCall();
    return this.#shared.begin(request, told);
  }

  #ownCall(request: GenerateRequest, told: Told): Underway {
    const connection = this.clients.begin();
    const call: ClientReadableStream<GenerateEvent> = connection.client.generate(request);
    call.once('status', ({ code }) => this.clients.end(connection, code === status.CANCELLED));
    call.on('error', (error) => told.failed(this.describeFailure(fromStatus(error))));
    call.on('end', () => {
      const cutOff = 'the answer ended without a finish reason; see its log';
      told.failed(new KvError('PROTOCOL', `engine at ${this.address}: ${cutOff}`));
    });
    call.on('data', told.event);
    return {
      leave: (answered) => {
        if (answered) this.#awaitStatus(call);
        else call.cancel(); // of no effect on a call that has ended
      },
      pause: () => call.pause(),
      resume: () => call.resume(),
    };
  }

  #sharedCall(): SharedCall {
    const connection = this.clients.begin();
    const call = connection.client.generateMany();
    call.once('status', ({ code }) => this.clients.end(connection, code === status.CANCELLED));
    const failureOf = (ended: { code?: status }): KvError =>
      ended.code === status.OK ? this.gone('ended the request') : this.describeFailure(fromStatus(ended));
    const shared: SharedCall = new SharedCall(call, failureOf as (error: unknown) => KvError, () => {
      if (this.#shared === shared) this.#shared = undefined;
    });
    return shared;
  }

  /** The engine has said all, and its status is under way: cancelling would only be one more reset (EngineClients). */
  #awaitStatus(call: ClientReadableStream<GenerateEvent>): void {
    const patience = setTimeout(() => call.cancel(), this.unaryDeadlineMs);
    call.once('status', () => clearTimeout(patience));
    call.resume();
  }

  /** All running requests end with this, and the next call begins on a connection of its own. */
  cut(why: KvError): void {
    this.#shared?.cut(why);
    this.#shared = undefined;
    for (const cut of [...this.#cuts]) cut(why);
    this.clients.renew();
  }

  /**
   * The stream of its load until it breaks (`onEnd`, once; not after the returned function was called). Whoever calls sees to it that
   * something comes.
   */
  watchLoad(
    watch: { sender: string; minIntervalMs: number },
    onLoad: (load: EngineLoad) => void,
    onEnd: (why: KvError) => void,
  ): () => void {
    const connection = this.clients.begin();
    const call = connection.client.watchLoad(watch);
    let over = false;
    call.on('data', (load: EngineLoad) => {
      if (!over) onLoad(load);
    });
    call.on('error', ignore); // told by its status
    call.once('status', (ended: Parameters<typeof fromStatus>[0] & { code: status }) => {
      this.clients.end(connection, ended.code === status.CANCELLED);
      if (over) return;
      over = true;
      onEnd(
        ended.code === status.OK ? this.gone('ended the stream of its load') : this.describeFailure(fromStatus(ended)),
      );
    });
    return () => {
      over = true;
      call.cancel();
    };
  }

  override async describe(): Promise<Description> {
    const description = await super.describe();
    this.#sharesCalls = description.generatesMany === true;
    return description;
  }

  override close(): void {
    this.#shared?.cut(new KvError('CANCELLED', `engine at ${this.address}: its line is closed`));
    super.close();
  }
}

const ignore = (): void => {};

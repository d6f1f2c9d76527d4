/** What the API server asks of the workers behind it: the registry's fleet is this. */
import type { OnEvent, StreamStart, Worker } from '@kvtier/registry';
import type { Description, GenerateRequest, PinPrefixRequest } from '@kvtier/wire/grpc';

/** The short questions to one of our own workers. All throw KvError. */
export interface EngineControl {
  describe(): Promise<Description>;
  /** In Prometheus' text form. */
  metrics(): Promise<string>;
  resetPrefixCache(): Promise<boolean>;
  pinPrefix(request: PinPrefixRequest): Promise<number>;
  unpinPrefix(name: string): Promise<boolean>;
  /** Requests that it still has. */
  drain(): Promise<number>;
}

/** An HTTP answer as it comes. */
export interface Forwarded {
  readonly status: number;
  readonly headers: Readonly<Record<string, string | string[] | undefined>>;
  /** Leaving the loop ends the request. @throws KvError DISCONNECTED, or the reason of the request's signal */
  readonly body: AsyncIterable<Buffer>;
  /** Of a stream of events: how it begins. undefined: it is none, or none that can be read. */
  readonly start?: StreamStart;
}

export interface Engines {
  workers(): readonly (Worker | undefined)[];
  /** A worker came, went, or changed. Returns what ends it. */
  onChange(listener: () => void): () => void;
  /** Why who is known may be old; undefined: it is not. */
  readonly discoveryProblem: string | undefined;
  /**
   * Of a `kvtier` worker: `onEvent` is told each event of the answer; a promise that it returns holds the stream back, false ends it.
   * @throws KvError DISCONNECTED: to be tried elsewhere; what `onEvent` threw
   */
  follow(number: number, request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void>;
  /** Of a `kvtier` worker. @throws KvError DISCONNECTED: it has left */
  engine(number: number): EngineControl;
  /** Of an `openai` worker. @throws KvError DISCONNECTED: nothing was answered, to be tried elsewhere */
  forward(
    number: number,
    path: string,
    headers: Readonly<Record<string, string>>,
    body: Uint8Array | string,
    signal: AbortSignal,
  ): Promise<Forwarded>;
}

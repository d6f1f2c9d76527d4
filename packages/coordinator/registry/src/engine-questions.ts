/**
 * Short questions to one engine worker (gRPC), and what its failures say.
 *
 * Invariant: every question has a deadline; who does not answer by then is the same as nobody there.
 */
import { type ClientUnaryCall, Metadata, type ServiceError, status } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import {
  type Description,
  deadlineAfter,
  type EngineClient,
  fromStatus,
  type PinPrefixRequest,
  type PrefetchRequest,
  type TlsFiles,
} from '@kvtier/wire/grpc';
import { EngineClients } from './engine-clients.ts';

export interface EngineQuestionsOptions {
  /** "unix:/path" or "host:port" */
  readonly address: string;
  /** For an address beyond loopback. */
  readonly tls?: TlsFiles | undefined;
  /** For what is answered at once: Metrics and the like. */
  readonly unaryDeadlineMs?: number;
  /** For Describe, by which one learns whether it is there. */
  readonly describeDeadlineMs?: number;
}

export class EngineQuestions {
  protected readonly clients: EngineClients;
  protected readonly address: string;
  protected readonly unaryDeadlineMs: number;
  readonly #describeDeadlineMs: number;
  readonly #asked = new Set<ClientUnaryCall>();

  constructor({ address, tls, unaryDeadlineMs = 2_000, describeDeadlineMs = unaryDeadlineMs }: EngineQuestionsOptions) {
    this.address = address;
    this.unaryDeadlineMs = unaryDeadlineMs;
    this.#describeDeadlineMs = describeDeadlineMs;
    this.clients = new EngineClients(address, tls);
  }

  /** What it is. @throws KvError */
  async describe(): Promise<Description> {
    return await this.#unary<Description>(
      (client, deadline, done) => client.describe({}, new Metadata(), { deadline }, done),
      this.#describeDeadlineMs,
    );
  }

  /** The engine's own metrics in Prometheus' text form. @throws KvError */
  async metrics(): Promise<string> {
    const answer = await this.#unary<{ prometheus: string }>((client, deadline, done) =>
      client.metrics({}, new Metadata(), { deadline }, done),
    );
    return answer.prometheus;
  }

  /** Whether the engine's own prefix cache was dropped; false while blocks are held. @throws KvError */
  async resetPrefixCache(): Promise<boolean> {
    const answer = await this.#unary<{ done: boolean }>((client, deadline, done) =>
      client.resetPrefixCache({}, new Metadata(), { deadline }, done),
    );
    return answer.done;
  }

  /** How many tokens of the prefix the engine holds from now on. @throws KvError: REQUEST (name in use), CONFIG (no room) */
  async pinPrefix(request: PinPrefixRequest): Promise<number> {
    const answer = await this.#unary<{ pinnedTokens: number }>((client, deadline, done) =>
      client.pinPrefix(request, new Metadata(), { deadline }, done),
    );
    return answer.pinnedTokens;
  }

  /** False when nothing is pinned under this name. @throws KvError */
  async unpinPrefix(name: string): Promise<boolean> {
    const answer = await this.#unary<{ done: boolean }>((client, deadline, done) =>
      client.unpinPrefix({ name }, new Metadata(), { deadline }, done),
    );
    return answer.done;
  }

  /** How many blocks its cache node was asked to bring in; 0: it has none. @throws KvError: REQUEST, BUSY (as many as may) */
  async prefetch(request: PrefetchRequest): Promise<number> {
    const answer = await this.#unary<{ blocks: number }>((client, deadline, done) =>
      client.prefetch(request, new Metadata(), { deadline }, done),
    );
    return answer.blocks;
  }

  /** So many blocks of a request's prompt come by its hand-off. False: it waits for none any more. @throws KvError */
  async changeHandOff(requestId: string, blocks: number): Promise<boolean> {
    const answer = await this.#unary<{ done: boolean }>((client, deadline, done) =>
      client.changeHandOff({ requestId, blocks }, new Metadata(), { deadline }, done),
    );
    return answer.done;
  }

  /**
   * The first token of a request that waits for its blocks. False: it draws it itself, or there is none.
   * @throws KvError
   */
  async tellFirstToken(requestId: string, tokenId: number): Promise<boolean> {
    const answer = await this.#unary<{ done: boolean }>((client, deadline, done) =>
      client.tellFirstToken({ requestId, tokenId }, new Metadata(), { deadline }, done),
    );
    return answer.done;
  }

  /** It takes nothing new from now on; how many requests it still has. @throws KvError */
  async drain(): Promise<number> {
    const answer = await this.#unary<{ left: number }>((client, deadline, done) =>
      client.drain({}, new Metadata(), { deadline }, done),
    );
    return answer.left;
  }

  /** Questions without an answer end: closing a connection lets them wait for their deadlines. */
  close(): void {
    for (const call of this.#asked) call.cancel();
    this.clients.close();
  }

  #unary<T>(
    start: (
      client: EngineClient,
      deadline: Date,
      done: (error: ServiceError | null, value: T) => void,
    ) => ClientUnaryCall,
    deadlineMs = this.unaryDeadlineMs,
  ): Promise<T> {
    const connection = this.clients.begin();
    return new Promise<T>((resolve, reject) => {
      const call = start(connection.client, deadlineAfter(deadlineMs), (error, value) => {
        this.#asked.delete(call);
        this.clients.end(connection, error?.code === status.DEADLINE_EXCEEDED);
        if (error) return reject(error);
        this.clients.answered();
        resolve(value);
      });
      this.#asked.add(call);
    }).catch((error: unknown) => {
      const failure = this.describeFailure(fromStatus(error));
      // Nobody answers: for a client of the API server that is the same as nobody there.
      throw failure.code === 'DEADLINE' ? this.gone('does not answer') : failure;
    });
  }

  /** grpc's words for a lost connection say little to a user. */
  protected describeFailure(failure: KvError): KvError {
    if (failure.code === 'DISCONNECTED') return this.gone('cannot be reached');
    // The call was cut by the other side: its server is closing.
    return failure.code === 'CANCELLED' ? this.gone('ended the request') : failure;
  }

  protected gone(what: string): KvError {
    const { refusal } = this.clients;
    if (refusal) return new KvError('DISCONNECTED', `engine: ${refusal.message}`, { retry: true });
    return new KvError('DISCONNECTED', `engine at ${this.address}: ${what}; it may be restarting, try again`, {
      retry: true,
    });
  }
}

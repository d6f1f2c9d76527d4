/**
 * Requests to a pod with OpenAI's API: they go there as they came, and their answers come back as they come.
 *
 * What an answer says of the pod its status tells, and of a stream of events its first one (stream-start.ts). One that fails there comes back
 * as the answer that it would have been without a stream.
 *
 * Invariants: requests at once are bounded; nothing is buffered between pod and caller but a socket's share, and a stream until it begins; a
 * body is let go as soon as it is sent; a caller that leaves, or its `signal`, ends the request at the pod. While the pod is silent, requests
 * that have not begun end after `unansweredMs` (to be tried elsewhere), all others after `stuckMs`. A request fails once.
 */
import type { IncomingHttpHeaders } from 'node:http';
import { KvError } from '@kvtier/errors';
import { type Dispatcher, Pool } from 'undici';
import { authorizationOf, connectorOf, gone, type PodAddress } from './pod-connection.ts';
import { outcomeOf, type StreamStart, startOf, type Verdict } from './stream-start.ts';

/** The answer of an openai worker, as it comes. */
export interface Forwarded {
  readonly status: number;
  readonly headers: IncomingHttpHeaders;
  /**
   * Leaving the loop ends the request, and so does `leave`, which waits for nothing. @throws KvError DISCONNECTED, DEADLINE, or the
   * reason of the request's signal
   */
  readonly body: AsyncIterable<Buffer>;
  /** Of a stream of events, which is held until it says so; undefined: it is none, or none that can be read. */
  readonly start?: StreamStart;
}

/** Nobody wants the body: a pod may never begin it. */
export async function leave({ body }: Forwarded): Promise<void> {
  await body[Symbol.asyncIterator]().return?.();
}

const maxConnections = 1_024;
/** Requests at once; more are refused with BUSY. */
const maxOpen = 4_096;
const [unansweredMs, stuckMs] = [2_000, 10_000];
/** Of one answer: until it begins, and between two parts of it. */
const silenceMs = 600_000;
const silences: ReadonlySet<string> = new Set(['UND_ERR_HEADERS_TIMEOUT', 'UND_ERR_BODY_TIMEOUT']);

/** Of one hop; the next one makes its own. */
const hop = new Set(
  'connection keep-alive proxy-connection transfer-encoding te trailer upgrade host content-length expect'.split(' '),
);

interface Running {
  answered: boolean;
  /** Nobody reads its answer any more. */
  left: boolean;
  /** That it failed has been told. */
  failed: boolean;
  readonly cut: AbortController;
}

export class PodRequests {
  readonly #pod: PodAddress;
  readonly #pool: Pool;
  readonly #running = new Set<Running>();
  readonly #onEnd: () => void;
  readonly #onOutcome: (failure: string | undefined) => void;
  #heardAtMs = Number.NEGATIVE_INFINITY;

  /**
   * `onEnd`: of a request, whatever became of it. `onOutcome`: what that says of the pod: it has answered (undefined), or has failed, and how.
   * A stream has answered with its first token, with a role behind which none comes at once, with more comments than anybody sends, or with
   * its end. A refusal (4xx) says nothing, nor does a request that somebody here ended.
   */
  constructor(
    pod: PodAddress,
    connectMs: number,
    onEnd: () => void,
    onOutcome: (failure: string | undefined) => void = () => {},
  ) {
    this.#pod = pod;
    this.#onEnd = onEnd;
    this.#onOutcome = onOutcome;
    this.#pool = new Pool(pod.origin.origin, {
      connections: maxConnections,
      pipelining: 1,
      connect: connectorOf(pod.access, connectMs),
      headersTimeout: silenceMs,
      bodyTimeout: silenceMs,
    });
  }

  get size(): number {
    return this.#running.size;
  }

  /** When something of an answer came last that had not been waiting for its reader, on performance.now(): the pod lived then. */
  get heardAtMs(): number {
    return this.#heardAtMs;
  }

  /** Something of an answer has just come. */
  heard(): void {
    this.#heardAtMs = performance.now();
  }

  /**
   * One request (POST), as it came; `headers` without those of one hop.
   * @throws KvError BUSY, DISCONNECTED, DEADLINE, or the reason of `signal`
   */
  async forward(
    path: string,
    headers: Readonly<Record<string, string>>,
    body: Uint8Array | string,
    signal: AbortSignal,
  ): Promise<Forwarded> {
    const { name } = this.#pod;
    if (signal.aborted) throw signal.reason;
    if (this.#running.size >= maxOpen) {
      throw new KvError('BUSY', `worker ${name}: ${maxOpen} requests are under way there; try again later`, {
        retry: true,
      });
    }
    const running: Running = { answered: false, left: false, failed: false, cut: new AbortController() };
    const cancel = (): void => running.cut.abort(signal.reason);
    signal.addEventListener('abort', cancel, { once: true });
    this.#running.add(running);
    const ended = (): void => {
      signal.removeEventListener('abort', cancel);
      if (this.#running.delete(running)) this.#onEnd();
    };
    let answer: Dispatcher.ResponseData;
    const sentAtMs = performance.now();
    try {
      answer = await this.#pool.request({
        path,
        method: 'POST',
        headers: {
          ...passedOn(headers),
          ...authorizationOf(this.#pod),
          'content-length': String(Buffer.byteLength(body)),
        },
        body: sendOnce(body) as unknown as Buffer, // whose type does not know it
        signal: running.cut.signal,
      });
    } catch (error) {
      ended();
      throw this.#failure(error, running);
    }
    running.answered = true;
    this.heard();
    const status = answer.statusCode;
    const kept = passedOn(answer.headers) as IncomingHttpHeaders;
    const forwarded: Forwarded = { status, headers: kept, body: this.#parts(answer.body, running, ended) };
    if (isReadableStream(forwarded)) return this.#begun(path, forwarded, running, sentAtMs);
    if (status >= 500) this.#failed(`${path} answers ${status}`, running);
    else if (status < 300) this.#onOutcome(undefined);
    return forwarded;
  }

  /** A stream, as soon as it says what it is. @throws KvError DISCONNECTED: it was aborted there; what `#parts` does */
  async #begun(path: string, answer: Forwarded, running: Running, sentAtMs: number): Promise<Forwarded> {
    const told = (verdict: Verdict): void => {
      const outcome = outcomeOf(verdict);
      if (outcome?.failure !== undefined) this.#failed(`${path} ${outcome.failure}`, running);
      else if (outcome) this.#onOutcome(undefined);
    };
    const { verdict, rest } = await startOf(answer.body[Symbol.asyncIterator](), { sentAtMs, told });
    const begun = { ...answer, body: rest };
    if (verdict.kind === 'goes on') {
      const { isRefused, finishReason } = verdict;
      return { ...begun, start: { isRefused, finishReason } };
    }
    await leave(begun);
    if (verdict.kind === 'aborted') throw gone(this.#pod, `${path} ${outcomeOf(verdict)!.failure}`);
    const { status, json } = verdict;
    const headers = { ...answer.headers, 'content-type': 'application/json' };
    return { status, headers, body: oneOf(Buffer.from(json)) };
  }

  #parts(body: Dispatcher.ResponseData['body'], running: Running, ended: () => void): AsyncIterable<Buffer> {
    body.once('close', ended);
    body.on('error', () => {}); // of one that is left before it was read
    const failure = (error: unknown): unknown => this.#failure(error, running);
    const end = (): void => {
      running.left = true;
      body.destroy();
      ended();
    };
    const heard = (): void => this.heard();
    const parts = (async function* () {
      const arriving = body[Symbol.asyncIterator]();
      try {
        for (;;) {
          const isWaitedFor = body.readableLength === 0;
          const part = await arriving.next();
          if (part.done === true) return;
          if (isWaitedFor) heard();
          yield part.value as Buffer;
        }
      } catch (error) {
        throw failure(error);
      } finally {
        end();
      }
    })();
    const iterator: AsyncIterator<Buffer> = {
      next: () => parts.next(),
      // A generator that was not begun ends without its `finally`, and one that waits for a part ends after it.
      return: () => {
        end();
        return parts.return(undefined);
      },
    };
    return { [Symbol.asyncIterator]: () => iterator };
  }

  /** The pod has said nothing for so long. */
  silent(why: KvError, silentForMs: number): void {
    for (const { answered, cut } of this.#running)
      if (silentForMs > stuckMs || (!answered && silentForMs > unansweredMs)) cut.abort(why);
  }

  async close(): Promise<void> {
    const left = new KvError('DISCONNECTED', `worker ${this.#pod.name}: has left; try again`, { retry: true });
    for (const { cut } of this.#running) cut.abort(left);
    await this.#pool.destroy();
  }

  #failed(why: string, running: Running): void {
    if (!running.failed) this.#onOutcome(why);
    running.failed = true;
  }

  /** Whoever cut it says why. */
  #failure(error: unknown, running: Running): unknown {
    const { cut, left } = running;
    if (cut.signal.aborted) return cut.signal.reason;
    const { code = '' } = error as { readonly code?: string };
    // A whole answer that takes so long would take another pod as long.
    if (silences.has(code)) {
      const said = `worker ${this.#pod.name}: said nothing of an answer for ${silenceMs / 1_000} s`;
      return new KvError('DEADLINE', `${said}; ask for a stream, or for fewer tokens`);
    }
    const { message } = error as Error;
    if (!left) this.#failed(message, running);
    return gone(this.#pod, message);
  }
}

/** It tells by its events what becomes of it. */
const isReadableStream = ({ status, headers }: Forwarded): boolean =>
  status === 200 &&
  /^text\/event-stream\b/i.test(headers['content-type'] ?? '') &&
  (headers['content-encoding'] ?? 'identity') === 'identity';

/**
 * A body to be sent. undici keeps what it was given until the answer has ended: this holds the bytes only until they are taken, as no
 * generator does.
 */
function sendOnce(body: Uint8Array | string): Iterable<Buffer> {
  let left: Buffer | undefined =
    typeof body === 'string' ? Buffer.from(body) : Buffer.from(body.buffer, body.byteOffset, body.byteLength);
  const next = (): IteratorResult<Buffer> => {
    const value = left;
    left = undefined;
    return value === undefined ? { done: true, value } : { done: false, value };
  };
  return { [Symbol.iterator]: () => ({ next }) };
}

async function* oneOf(part: Buffer): AsyncGenerator<Buffer> {
  yield part;
}

function passedOn(headers: IncomingHttpHeaders | Readonly<Record<string, string>>): Record<string, string | string[]> {
  const kept: Record<string, string | string[]> = {};
  for (const [name, value] of Object.entries(headers))
    if (value !== undefined && !hop.has(name.toLowerCase())) kept[name] = value;
  return kept;
}

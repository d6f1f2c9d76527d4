/**
 * Server-sent events to one client. After the first of them they go to its socket as they are, each as a chunk of HTTP/1.1 written in one
 * piece: a response takes three pieces and another turn for it, which is half of what a token costs.
 *
 * Invariants: what is sent goes out in its order, all of it before the end, and nothing behind it: a connection that is kept has the next
 * answer there. At most one chunk per answer, and one for each of its moves, waits beyond the socket's buffer; a client that does not read
 * for `unreadMs` is cut off.
 */
import type { ServerResponse } from 'node:http';
import { setImmediate } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';

/** Headers of any stream of events: it is nothing to keep, and a proxy must not collect what is meant to be seen at once. */
export const ofStreams = { 'cache-control': 'no-cache', 'x-accel-buffering': 'no' } as const;

export interface EventStreamOptions {
  /** A client that takes nothing for so long is cut off. */
  readonly unreadMs: number;
  /** The client has taken what waited for it. */
  readonly taken: () => void;
  readonly headers: Readonly<Record<string, string>>;
}

export class EventStream {
  readonly #response: ServerResponse;
  readonly #unreadMs: number;
  readonly #taken: () => void;
  #hasBegun = false;
  /** Its end is written, or waits for its turn. */
  #hasEnded = false;
  #drained: Promise<void> | undefined;
  /** Large chunks one after the other, and what is sent while some of these wait; never rejects. */
  #turns: Promise<void> = Promise.resolve();
  /** Whose turn has not ended. */
  #waiting = 0;

  constructor(response: ServerResponse, requestId: string, { unreadMs, taken, headers }: EventStreamOptions) {
    this.#response = response;
    this.#unreadMs = unreadMs;
    this.#taken = taken;
    response.writeHead(200, {
      ...headers,
      'content-type': 'text/event-stream; charset=utf-8',
      ...ofStreams,
      'x-request-id': requestId,
    });
  }

  /**
   * In one write. undefined: the client can take more; else resolves when it can, and rejects with KvError CANCELLED when it is gone,
   * does not read, or was told the end
   */
  send(chunks: readonly unknown[]): void | Promise<void> {
    return this.#send(eventsOf(chunks));
  }

  /** The same of one chunk that is JSON already. */
  sendText(json: string): void | Promise<void> {
    return this.#send(eventOf(json));
  }

  /** The same for large ones, each in a turn of its own: those of many answers may come in one. */
  sendInTurn(chunks: readonly unknown[]): Promise<void> {
    if (this.#hasEnded) return refused();
    return this.#inTurn(async () => {
      await setImmediate();
      await this.#sendNow(eventsOf(chunks));
    });
  }

  /** With the last of its chunks, behind what waits. undefined: it has ended; else resolves when it has. Only the first end is told. */
  end(chunks: readonly unknown[]): void | Promise<void> {
    return this.#end(`${eventsOf(chunks)}data: [DONE]\n\n`);
  }

  /** The same after a failure in the middle: what went wrong, and no [DONE]. */
  fail(body: unknown): void | Promise<void> {
    return this.#end(`data: ${JSON.stringify(body)}\n\n`);
  }

  #send(text: string): void | Promise<void> {
    if (this.#hasEnded) return refused();
    return this.#waiting === 0 ? this.#sendNow(text) : this.#sendInTurn(text);
  }

  /** Apart from `#send`: a function in which another one is made costs each token more. */
  #sendInTurn(text: string): Promise<void> {
    return this.#inTurn(() => this.#sendNow(text));
  }

  #sendNow(text: string): void | Promise<void> {
    return text === '' || this.#write(text) ? undefined : this.#drain();
  }

  #end(text: string): void | Promise<void> {
    if (this.#hasEnded) return undefined;
    this.#hasEnded = true;
    const end = (): void => {
      if (!this.#response.destroyed) this.#response.end(text);
    };
    return this.#waiting === 0 ? end() : this.#inTurn(end);
  }

  /** Behind what waits, and after the client can take more, or is gone. */
  #inTurn(write: () => void | Promise<void>): Promise<void> {
    this.#waiting++;
    const written = this.#turns.then(write);
    const over = (): void => void this.#waiting--;
    this.#turns = written.then(over, over);
    return written;
  }

  /** False: wait until it drains. */
  #write(text: string): boolean {
    const response = this.#response;
    const { socket } = response;
    // Without a socket it waits for an answer to an earlier request on the same connection; HTTP/1.0 knows no chunks.
    if (!this.#hasBegun || socket === null || !response.chunkedEncoding) {
      this.#hasBegun = true;
      return response.write(text);
    }
    const bytes = Buffer.byteLength(text);
    const encoding = bytes === text.length ? 'latin1' : 'utf8';
    return socket.write(`${bytes.toString(16)}\r\n${text}\r\n`, encoding);
  }

  /** One wait for all the answers of a request. */
  #drain(): Promise<void> {
    this.#drained ??= new Promise<void>((resolve, reject) => {
      const response = this.#response;
      // Whichever was written to.
      const { socket } = response;
      const settle = (failed: string | undefined): void => {
        clearTimeout(timer);
        response.off('drain', onDrain);
        socket?.off('drain', onDrain);
        response.off('close', onClose);
        this.#drained = undefined;
        if (failed !== undefined) reject(new KvError('CANCELLED', failed));
        else {
          this.#taken();
          resolve();
        }
      };
      const onDrain = (): void => settle(undefined);
      const onClose = (): void => settle('the client ended the request');
      const timer = setTimeout(() => {
        response.destroy();
        settle(`the client did not read for ${this.#unreadMs / 1000} s`);
      }, this.#unreadMs);
      response.once('drain', onDrain);
      socket?.once('drain', onDrain);
      response.once('close', onClose);
      if (response.destroyed) onClose();
    });
    return this.#drained;
  }
}

const refused = (): Promise<void> => Promise.reject(new KvError('CANCELLED', 'the stream has ended'));

const eventOf = (json: string): string => `data: ${json}\n\n`;

function eventsOf(chunks: readonly unknown[]): string {
  let text = '';
  for (const chunk of chunks) text += eventOf(JSON.stringify(chunk));
  return text;
}

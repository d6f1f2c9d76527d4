/** What is sent to a gateway, which may read slowly: who waits for its reading holds no more than what the stream has. */
import type { ServerDuplexStream } from '@grpc/grpc-js';
import type { ProcessingRequest, ProcessingResponse } from '@kvtier/wire/ext-proc';

export type ProcessCall = ServerDuplexStream<ProcessingRequest, ProcessingResponse>;

export class Outgoing {
  readonly #call: ProcessCall;
  readonly #isOver: () => boolean;

  /** `isOver`: nothing is sent any more. */
  constructor(call: ProcessCall, isOver: () => boolean) {
    this.#call = call;
    this.#isOver = isOver;
  }

  /** A promise where the gateway has to read first. */
  send(response: ProcessingResponse): Promise<void> | undefined {
    if (this.#isOver() || this.#call.write(response)) return undefined;
    return this.drained();
  }

  sendAll(responses: Iterable<ProcessingResponse>): Promise<void> | undefined {
    const rest = responses[Symbol.iterator]();
    for (let next = rest.next(); !next.done; next = rest.next()) {
      const pending = this.send(next.value);
      if (pending) return pending.then(() => this.sendAll({ [Symbol.iterator]: () => rest }));
    }
    return undefined;
  }

  /** The gateway has taken what was sent, or the stream is over. */
  drained(): Promise<void> | undefined {
    if (this.#isOver() || !this.#call.writableNeedDrain) return undefined;
    return new Promise((resolve) => {
      const done = (): void => {
        this.#call.off('drain', done);
        this.#call.off('close', done);
        resolve();
      };
      this.#call.once('drain', done);
      this.#call.once('close', done);
    });
  }
}

/**
 * Waits for what is outside this process. A server, a credential process or a name server may never answer, so that nobody may wait
 * for one without a limit: `within` is that wait, and a client in an `Outside` cannot be reached but with a limit (law 2).
 *
 *     within(what, limitMs, wait)             one wait
 *     new Outside(what, client).ask(limitMs, call)   the only way to a promise of that client; .now(look): what takes no time
 *
 * Invariants: the wait has ended by its limit (and a turn); what the call brings later is dropped, and its failure is nobody's. So it
 * must not touch what belongs to the caller: bytes into somebody's memory need a transport that can be cut off.
 * test/style/outside.test.ts: clients of servers are made inside an `Outside`, and nowhere else.
 */
import { KvError } from './kv-error.ts';

/**
 * What `wait` brings, or KvError DEADLINE (retry) after `limitMs`; not begun at all when that is not above 0. `signal` aborts at the
 * limit, for what can be told to stop.
 */
export function within<T>(
  what: string,
  limitMs: number,
  wait: (signal: AbortSignal) => PromiseLike<T> | T,
): Promise<T> {
  return new Promise((resolve, reject) => {
    if (!(limitMs > 0)) {
      reject(new KvError('DEADLINE', `${what}: the time limit was reached`, { retry: true }));
      return;
    }
    const controller = new AbortController();
    const timer = setTimeout(() => {
      // First: what the abortion brings is not the answer.
      reject(new KvError('DEADLINE', `${what}: no answer within ${Math.ceil(limitMs)} ms`, { retry: true }));
      controller.abort();
    }, Math.ceil(limitMs));
    const ended =
      <V>(tell: (value: V) => void) =>
      (value: V): void => {
        clearTimeout(timer);
        tell(value);
      };
    // A call that throws before it waits is a promise that rejects.
    new Promise<T>((begin) => begin(wait(controller.signal))).then(ended(resolve), ended(reject));
  });
}

export class Outside<C extends object> {
  readonly #what: string;
  readonly #client: C;

  constructor(what: string, client: C) {
    this.#what = what;
    this.#client = client;
  }

  /** What `call` brings, within the limit: see `within`. `what`: for the error's line. */
  ask<T>(
    limitMs: number,
    call: (client: C, signal: AbortSignal) => PromiseLike<T>,
    what: string = this.#what,
  ): Promise<T> {
    return within(what, limitMs, (signal) => call(this.#client, signal));
  }

  /** What is known, and what is begun without waiting for it. A promise is refused by its type. */
  now<R>(look: (client: C) => R, ..._waits: R extends PromiseLike<unknown> ? ['ask, with a limit'] : []): R {
    return look(this.#client);
  }
}

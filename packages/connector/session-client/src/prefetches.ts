/**
 * Hints to the node that a request waits, and their end: the request is gone before it loaded anything, so that the node need
 * not go on bringing up its blocks. Nobody waits for any of these answers.
 *
 * Invariant: a request has one hint per session at most, and is forgotten once it loads (then it asks for the blocks itself) or is
 * gone; a cancellation goes only over the connection that its prefetch went over, because ids are the connection's own.
 */
import { KvError } from '@kvtier/errors';
import { type ConnectorCounters, count } from './counters.ts';
import type { SessionLink } from './session-link.ts';

/** Nobody waits for an answer; it only says that the node is alive. */
const deadlineMs = 1_000;

export class Prefetches {
  readonly #counters: ConnectorCounters;
  readonly #begun = new Map<string, { readonly link: SessionLink; readonly id: bigint }[]>();

  constructor(counters: ConnectorCounters) {
    this.#counters = counters;
  }

  /** Requests whose hint may still be at work. */
  get size(): number {
    return this.#begun.size;
  }

  begin(requestId: string, link: SessionLink, hashes: Buffer): void {
    const onSent = (id: bigint): void => {
      this.#begun.set(requestId, [...(this.#begun.get(requestId) ?? []), { link, id }]);
    };
    link.call({ $case: 'prefetch', value: { hashes } }, 'prefetching', deadlineMs, { onSent }).then(
      ({ accepted, reason }) => {
        if (accepted) this.#counters.prefetches++;
        else count(this.#counters, 'prefetch', reason);
      },
      (error: unknown) => count(this.#counters, 'prefetch', KvError.from(error).code.toLowerCase()),
    );
  }

  /** The request loads now: what it wants it asks for itself. */
  superseded(requestId: string): void {
    this.#begun.delete(requestId);
  }

  /** The request is gone. */
  cancel(requestId: string): void {
    for (const { link, id } of this.#begun.get(requestId) ?? []) {
      if (!link.alive) continue;
      // Owed: it gives something back.
      link.call({ $case: 'cancelPrefetch', value: { prefetchId: id } }, 'done', deadlineMs, { owed: true }).then(
        ({ count: blocks }) => {
          this.#counters.cancelledPrefetchBlocks += blocks;
        },
        () => {}, // as with the hint itself: whoever does not answer is noticed by those who wait
      );
    }
    this.#begun.delete(requestId);
  }
}

/**
 * Blocks that loads wait for and that cannot be had now, by name: what comes wakes those who wait for it, and nobody else is looked at.
 *
 *     Load ──add──▶ waiters of a block ◀── arrived ── it was published in the arena: pinned in that very turn
 *                                      ◀── listed ─── a lower tier holds it: fetched when that turn is over, for a listener may not
 *                                                     call back into its tier
 *
 * Invariants: a waiter is here exactly as long as its load waits for that block; bounded per session and per node. A block that a
 * tier holds and cannot give now (its breaker is open, its read failed) is tried again every `awaitRetryMs`, a batch a turn.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock } from '@kvtier/runtime';
import type { Counters } from './counters.ts';
import type { AwaitClient, FetchFailure, NamespaceState, Waiter } from './fetches.ts';
import type { StoreLimits } from './limits.ts';
import type { Namespaces } from './namespaces.ts';
import { stepping } from './steps.ts';
import type { TierGate } from './tier-gate.ts';

export interface AwaitingOptions {
  readonly namespaces: Namespaces;
  readonly clock: Clock;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  /** The lower tier that can give the block now, if one can. */
  readonly locate: (state: NamespaceState, hash: HashKey) => TierGate | undefined;
  /** A tier holds it, whether it can be asked or not. */
  readonly isListed: (namespace: Namespace, hash: HashKey) => boolean;
}

export class Awaiting {
  readonly #options: AwaitingOptions;
  #count = 0;
  /** Listed in this turn. */
  readonly #woken = new Set<Waiter>();
  /** Tried again when the timer fires, and in the turns after it. */
  #later = new Set<Waiter>();
  #due = new Set<Waiter>();
  #cancelTimer: (() => void) | undefined;

  constructor(options: AwaitingOptions) {
    this.#options = options;
  }

  /** Blocks that are waited for, once for each load. */
  get count(): number {
    return this.#count;
  }

  /** `reason`: why it is not there. Undefined, counted: more is waited for than may be. */
  add(client: AwaitClient, index: number, hash: HashKey, reason: FetchFailure): Waiter | undefined {
    const { limits, counters, isListed } = this.#options;
    const { state, session } = client;
    if (session.awaited >= limits.maxAwaitedBlocks) {
      counters.add('await.refused.session_limit');
      return undefined;
    }
    if (this.#count >= limits.maxAwaitedInAll) {
      counters.add('await.refused.node_limit');
      return undefined;
    }
    const first = state.awaited.get(hash);
    const waiter: Waiter = { client, index, hash, previous: undefined, next: first };
    if (first !== undefined) first.previous = waiter;
    state.awaited.set(hash, waiter);
    session.awaited++;
    this.#count++;
    counters.add('await.blocks.asked');
    if (isListed(state.namespace, hash)) {
      // The bad copy is gone, so this is another one.
      if (reason === 'corrupt') this.#wake(waiter);
      else this.#tryLater(waiter);
    }
    return waiter;
  }

  /** Its load does not wait for it any more. */
  delete(waiter: Waiter): void {
    const { previous, next, hash, client } = waiter;
    if (previous !== undefined) previous.next = next;
    else if (next !== undefined) client.state.awaited.set(hash, next);
    else client.state.awaited.delete(hash);
    if (next !== undefined) next.previous = previous;
    client.session.awaited--;
    this.#count--;
    this.#woken.delete(waiter);
    this.#later.delete(waiter);
    this.#due.delete(waiter);
    if (this.#later.size + this.#due.size === 0) this.close();
  }

  /** It was published in the arena in this turn. */
  arrived(state: NamespaceState, hash: HashKey): void {
    if (this.#count === 0) return;
    for (let waiter = state.awaited.get(hash); waiter !== undefined; waiter = state.awaited.get(hash)) {
      this.delete(waiter);
      this.#options.counters.add('await.blocks.came');
      waiter.client.came(waiter.index);
    }
  }

  /** A lower tier holds it from now on. */
  listed(namespace: Namespace, hash: HashKey): void {
    if (this.#count === 0) return;
    const first = this.#options.namespaces.get(namespace)?.awaited.get(hash);
    for (let waiter = first; waiter !== undefined; waiter = waiter.next) this.#wake(waiter);
  }

  /** No timer is left. */
  close(): void {
    this.#cancelTimer?.();
    this.#cancelTimer = undefined;
  }

  checkIntegrity(): void {
    let count = 0;
    for (const { awaited } of this.#options.namespaces.all()) {
      for (const [hash, first] of awaited) {
        for (let waiter: Waiter | undefined = first; waiter !== undefined; waiter = waiter.next) {
          invariant(waiter.hash === hash && (waiter.next?.previous ?? waiter) === waiter, 'awaiting: a list is broken');
          count++;
        }
      }
    }
    invariant(count === this.#count, 'awaiting: waiters are miscounted');
  }

  #wake(waiter: Waiter): void {
    if (this.#woken.size === 0) {
      queueMicrotask(() => {
        const woken = [...this.#woken];
        this.#woken.clear();
        this.#try(woken);
      });
    }
    this.#woken.add(waiter);
  }

  #try(waiters: readonly Waiter[]): void {
    const { locate, counters } = this.#options;
    const clients = new Set<AwaitClient>();
    for (const waiter of waiters) {
      const { client, index, hash } = waiter;
      if (locate(client.state, hash) === undefined) {
        this.#tryLater(waiter);
        continue;
      }
      this.delete(waiter);
      counters.add('await.blocks.came');
      client.listed(index);
      clients.add(client);
    }
    for (const client of clients) client.fetch();
  }

  #tryLater(waiter: Waiter): void {
    this.#later.add(waiter);
    this.#schedule();
  }

  #schedule(): void {
    const { clock, limits } = this.#options;
    this.#cancelTimer ??= clock.after(this.#due.size > 0 ? 0 : limits.awaitRetryMs, () => {
      this.#cancelTimer = undefined;
      if (this.#due.size === 0) [this.#due, this.#later] = [this.#later, this.#due];
      const batch: Waiter[] = [];
      for (const waiter of this.#due) {
        if (batch.length === stepping.looked) break;
        batch.push(waiter);
        this.#due.delete(waiter);
      }
      this.#try(batch);
      if (this.#later.size + this.#due.size > 0) this.#schedule();
    });
  }
}

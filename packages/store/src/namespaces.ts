/**
 * The namespaces that open sessions use: what is being written and fetched in each. An entry lives as long as someone
 * holds it, so their number is bounded by that of the sessions. Invariant: all sessions of a namespace agree on the
 * size of a block; the size is part of what the digest was made of.
 */
import { invariant, KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Fetch } from './fetcher.ts';

export interface NamespaceState {
  readonly namespace: Namespace;
  readonly payloadBytes: number;
  /** Reserved by a session that is alive and not yet committed. */
  readonly writing: Set<HashKey>;
  readonly fetching: Map<HashKey, Fetch>;
  holders: number;
}

export class Namespaces {
  readonly #states = new Map<string, NamespaceState>();

  /** KvError PROTOCOL when the namespace is in use with another block size. Balanced by `release`. */
  acquire(namespace: Namespace, payloadBytes: number): NamespaceState {
    let state = this.#states.get(namespace.key);
    if (state === undefined) {
      state = { namespace, payloadBytes, writing: new Set(), fetching: new Map(), holders: 0 };
      this.#states.set(namespace.key, state);
    }
    if (state.payloadBytes !== payloadBytes) {
      throw new KvError(
        'PROTOCOL',
        `attach: this namespace has blocks of ${state.payloadBytes} bytes, not ${payloadBytes}; one of the two engines computes its namespace wrongly`,
      );
    }
    state.holders++;
    return state;
  }

  get(namespace: Namespace): NamespaceState | undefined {
    return this.#states.get(namespace.key);
  }

  release(state: NamespaceState): void {
    invariant(state.holders > 0, 'namespace: released more often than acquired');
    state.holders--;
    if (state.holders === 0) this.#states.delete(state.namespace.key);
  }

  get count(): number {
    return this.#states.size;
  }
}

/**
 * The namespaces that open sessions use: what is being written, fetched and awaited in each. An entry lives as long as someone
 * holds it, so their number is bounded by that of the sessions. Invariants: all sessions of a namespace agree on the
 * size of a block; the size is part of what the digest was made of. All names in a namespace are of one length, those that tiers
 * hold since before, too; that is known of the `maxKnown` namespaces that came last.
 */
import { invariant, KvError } from '@kvtier/errors';
import type { Namespace } from '@kvtier/identity';
import type { NamespaceState } from './fetches.ts';

const maxKnown = 4096;

export class Namespaces {
  readonly #states = new Map<string, NamespaceState>();
  /** Bytes of a hash. */
  readonly #hashBytes = new Map<string, number>();
  #learnt = '';

  /** A block of this name length is held in the namespace. */
  learn({ key }: Namespace, hashBytes: number): void {
    if (key === this.#learnt) return;
    this.#learnt = key;
    if (this.#hashBytes.has(key) || (hashBytes !== 16 && hashBytes !== 32)) return;
    const [oldest] = this.#hashBytes.keys();
    if (this.#hashBytes.size >= maxKnown) this.#hashBytes.delete(oldest!);
    this.#hashBytes.set(key, hashBytes);
  }

  /** KvError PROTOCOL when the namespace is known with another size of blocks or hashes. Balanced by `release`. */
  acquire(namespace: Namespace, payloadBytes: number, hashBytes?: number): NamespaceState {
    const known = this.#hashBytes.get(namespace.key);
    if (hashBytes !== undefined && known !== undefined && known !== hashBytes) {
      throw new KvError(
        'PROTOCOL',
        `attach: this namespace has hashes of ${known} bytes, not ${hashBytes}; one of the two engines computes its namespace wrongly`,
      );
    }
    let state = this.#states.get(namespace.key);
    if (state === undefined) {
      state = { namespace, payloadBytes, writing: new Set(), fetching: new Map(), awaited: new Map(), holders: 0 };
      this.#states.set(namespace.key, state);
    }
    if (state.payloadBytes !== payloadBytes) {
      throw new KvError(
        'PROTOCOL',
        `attach: this namespace has blocks of ${state.payloadBytes} bytes, not ${payloadBytes}; one of the two engines computes its namespace wrongly`,
      );
    }
    if (hashBytes !== undefined) this.learn(namespace, hashBytes);
    state.holders++;
    return state;
  }

  get(namespace: Namespace): NamespaceState | undefined {
    return this.#states.get(namespace.key);
  }

  all(): IterableIterator<NamespaceState> {
    return this.#states.values();
  }

  release(state: NamespaceState): void {
    invariant(state.holders > 0, 'namespace: released more often than acquired');
    state.holders--;
    if (state.holders > 0) return;
    invariant(state.awaited.size === 0, 'namespace: somebody waits for a block, and no session is left');
    this.#states.delete(state.namespace.key);
  }

  get count(): number {
    return this.#states.size;
  }
}

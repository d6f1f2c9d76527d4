/** Objects that have arrived in slots, verified in native code off the JavaScript thread, as many at once as arrived in one turn. */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import type { HashKey, Namespace } from '@kvtier/identity';
import { identitiesOf, identityBytes } from '../disk/disk-io.ts';
import { type Verdict, verdictOf } from '../kit/faults.ts';

interface Arrived {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly slot: number;
  readonly bytes: number;
  readonly resolve: (verdict: Verdict) => void;
  readonly reject: (error: unknown) => void;
}

export class Verifier {
  readonly #arena: ArenaHandle;
  #arrived: Arrived[] = [];

  constructor(arena: ArenaHandle) {
    this.#arena = arena;
  }

  /** Is the object in `slot`, of `bytes`, the one of this name, whole? */
  verdict(namespace: Namespace, hash: HashKey, slot: number, bytes: number): Promise<Verdict> {
    return new Promise((resolve, reject) => {
      this.#arrived.push({ namespace, hash, slot, bytes, resolve, reject });
      if (this.#arrived.length === 1) setImmediate(() => void this.#verify());
    });
  }

  async #verify(): Promise<void> {
    const rows = this.#arrived;
    this.#arrived = [];
    const identities = Buffer.alloc(rows.length * identityBytes);
    for (const [i, { namespace, hash }] of rows.entries()) {
      identities.set(identitiesOf(namespace, [hash]), i * identityBytes);
    }
    const slots = Float64Array.from(rows, ({ slot }) => slot);
    const bytes = Float64Array.from(rows, (row) => row.bytes);
    try {
      const faults = await native.arenaVerify(this.#arena, slots, bytes, identities);
      for (const [i, { resolve }] of rows.entries()) resolve(verdictOf(faults[i]!));
    } catch (error) {
      for (const { reject } of rows) reject(error);
    }
  }
}

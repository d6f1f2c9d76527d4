/**
 * Which peer holds which block, in memory: what makes a lookup ask nobody. A block's entry is one small number, two bits a peer
 * (its arena, what is below). Invariants: a block without a holder has no entry; at most `maxBlocks` entries, what goes beyond
 * is left out and counted.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';

/** Two bits each in a 32-bit number. */
export const maxPeers = 16;

interface Space {
  readonly namespace: Namespace;
  readonly blocks: Map<HashKey, number>;
}
type Names = readonly (readonly [Namespace, readonly HashKey[]])[];

export const bitOf = (peer: number, tier: 0 | 1): number => 1 << (peer * 2 + tier);
export const bitsOf = (peer: number): number => 3 << (peer * 2);

export class PeerDirectory {
  readonly #spaces = new Map<string, Space>();
  readonly #maxBlocks: number;
  #count = 0;
  /** Blocks that did not fit. */
  leftOut = 0;

  constructor(maxBlocks: number) {
    this.#maxBlocks = maxBlocks;
  }

  get count(): number {
    return this.#count;
  }

  /** Bits of who holds it; 0: nobody. */
  holders(namespace: Namespace, hash: HashKey): number {
    return this.#spaces.get(namespace.key)?.blocks.get(hash) ?? 0;
  }

  /** Bits of who holds it, of all blocks of a namespace; to be read at once and not kept. */
  holdersIn(namespace: Namespace): ReadonlyMap<HashKey, number> | undefined {
    return this.#spaces.get(namespace.key)?.blocks;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const blocks = this.#spaces.get(namespace.key)?.blocks;
    if (blocks === undefined) return 0;
    let held = 0;
    while (held < hashes.length && blocks.has(hashes[held]!)) held++;
    return held;
  }

  /** Returns the blocks that nobody held before. */
  add(namespace: Namespace, hashes: readonly HashKey[], bits: number): HashKey[] {
    let space = this.#spaces.get(namespace.key);
    if (space === undefined) {
      space = { namespace, blocks: new Map() };
      this.#spaces.set(namespace.key, space);
    }
    const added: HashKey[] = [];
    for (const hash of hashes) {
      const before = space.blocks.get(hash);
      if (before === undefined) {
        if (this.#count >= this.#maxBlocks) {
          this.leftOut++;
          continue;
        }
        this.#count++;
        added.push(hash);
      }
      space.blocks.set(hash, (before ?? 0) | bits);
    }
    this.#dropIfEmpty(space);
    return added;
  }

  /** Returns the blocks that nobody holds any more. */
  remove(namespace: Namespace, hashes: readonly HashKey[], bits: number): HashKey[] {
    const space = this.#spaces.get(namespace.key);
    if (space === undefined) return [];
    const gone = hashes.filter((hash) => this.#clear(space, hash, bits));
    this.#dropIfEmpty(space);
    return gone;
  }

  /** All of what `bits` hold; returns the blocks that nobody holds any more. */
  drop(bits: number): Names {
    return [...this.#spaces.values()].map((space) => {
      const gone = [...space.blocks.keys()].filter((hash) => this.#clear(space, hash, bits));
      this.#dropIfEmpty(space);
      return [space.namespace, gone] as const;
    });
  }

  all(): Names {
    return [...this.#spaces.values()].map(({ namespace, blocks }) => [namespace, [...blocks.keys()]] as const);
  }

  checkIntegrity(): void {
    let count = 0;
    for (const { blocks } of this.#spaces.values()) {
      invariant(blocks.size > 0, 'peer directory: an empty namespace');
      for (const bits of blocks.values()) invariant(bits !== 0, 'peer directory: a block that nobody holds');
      count += blocks.size;
    }
    invariant(count === this.#count && count <= this.#maxBlocks, 'peer directory: the count is wrong');
  }

  #clear({ blocks }: Space, hash: HashKey, bits: number): boolean {
    const before = blocks.get(hash);
    if (before === undefined) return false;
    const after = before & ~bits;
    if (after !== 0) {
      if (after !== before) blocks.set(hash, after);
      return false;
    }
    blocks.delete(hash);
    this.#count--;
    return true;
  }

  #dropIfEmpty({ namespace, blocks }: Space): void {
    if (blocks.size === 0) this.#spaces.delete(namespace.key);
  }
}

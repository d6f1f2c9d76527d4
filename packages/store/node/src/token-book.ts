/**
 * Token ids of blocks, as engines say them when they store: for KV events that tell a router all that it needs to name the blocks by
 * itself. The oldest go when there is no room; a block without is told as its hash alone. An engine's word, as its hashes are.
 *
 * Invariants: never above `maxBytes`, by what an entry takes at most: its tokens, four bytes each, and `entryBytes`; never above
 * `maxBlocks`.
 */
import type { Buffer } from 'node:buffer';
import type { HashKey, Namespace } from '@kvtier/identity';

/** Of memory, besides the tokens: the names of the block and of its parent, the entry, its place in the map. Measured: 190. */
export const entryBytes = 320;
export const tokenBytes = 4;
/**
 * A Map has room for 2^24 entries, and those that were removed count until they are half of it: with more than half of that room in use it
 * throws at one more. Below it by one, since what is new comes before the oldest goes.
 */
const mostBlocks = 2 ** 23 - 1;

export interface KnownTokens {
  /** null: the block begins a chain. */
  readonly parent: HashKey | null;
  readonly tokenIds: Uint32Array;
}

export class TokenBook {
  readonly #maxBytes: number;
  readonly #maxBlocks: number;
  /** Oldest first; tokens as characters of one byte each, little-endian: half the memory of an array of its own. */
  readonly #blocks = new Map<string, { readonly parent: HashKey | null; readonly tokens: string }>();
  #bytes = 0;
  #dropped = 0;

  constructor(maxBytes: number, maxBlocks = mostBlocks) {
    this.#maxBytes = maxBytes;
    this.#maxBlocks = maxBlocks;
  }

  /** Tokens of the block that follows `parent`, u32 little-endian. What is known already becomes the youngest. */
  learn({ key }: Namespace, hash: HashKey, parent: HashKey | null, tokens: Buffer): void {
    const name = key + hash;
    this.#delete(name);
    this.#blocks.set(name, { parent, tokens: tokens.toString('latin1') });
    this.#bytes += entryBytes + tokens.length;
    for (const oldest of this.#blocks.keys()) {
      if (this.#bytes <= this.#maxBytes && this.#blocks.size <= this.#maxBlocks) break;
      this.#delete(oldest);
      this.#dropped++;
    }
  }

  of({ key }: Namespace, hash: HashKey): KnownTokens | undefined {
    const known = this.#blocks.get(key + hash);
    if (known === undefined) return undefined;
    const { parent, tokens } = known;
    const tokenIds = new Uint32Array(tokens.length / tokenBytes);
    for (let at = 0; at < tokenIds.length; at++) {
      const from = at * tokenBytes;
      const high = (tokens.charCodeAt(from + 3) << 24) | (tokens.charCodeAt(from + 2) << 16);
      tokenIds[at] = high | (tokens.charCodeAt(from + 1) << 8) | tokens.charCodeAt(from);
    }
    return { parent, tokenIds };
  }

  /** `dropped`: blocks that made room for others, in all. */
  stats(): { readonly blocks: number; readonly bytes: number; readonly dropped: number } {
    return { blocks: this.#blocks.size, bytes: this.#bytes, dropped: this.#dropped };
  }

  #delete(name: string): void {
    const known = this.#blocks.get(name);
    if (known === undefined) return;
    this.#bytes -= entryBytes + known.tokens.length;
    this.#blocks.delete(name);
  }
}

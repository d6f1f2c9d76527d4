/**
 * Which blocks of the engine's pool go down to the tier when not all of them do: those that the pool is about to reuse, and those
 * that have proved their worth. What is computed once and never asked for again then costs no copy as long as the pool
 * keeps it, and what the pool lets go of lies in the tier already, so that an eviction never waits.
 *
 *     order of eviction   ■ ■ ■ ■ | □ □ □ □ □ …       the next `aheadBlocks`: due
 *     hit twice                       ▣                due at once, whoever holds it
 *     a due block         root ── a ── b ── due        with all of its chain that has not gone yet, parents first, because
 *                                                      a block without its parent is never found in the tier
 *
 * Pure: what is in the pool is told (`computed`) and asked for (`isCached`). One record per block: its chain's hash, its parent,
 * its hits. Invariant: a block is due only while it is cached under the hash of its record; each time a request hits it after
 * it has gone, it may go again, because the tier may have lost it.
 */
import { invariant } from '@kvtier/errors';

/** A run of one chain, as Connector.store takes it. */
export interface ChainPiece {
  /** Packed; the hash before the first block, if it has a parent, and then one per block. */
  readonly hashes: Buffer;
  /** Of `hashes`, the first that belongs to a block: 0 at the root, else 1. */
  readonly firstBlock: 0 | 1;
  readonly blockIds: readonly number[];
}

/** Hits after which a block is worth having in the tier whatever the pool does. */
const provenHits = 2;
/** Of the proven blocks that one call looks at: a pool may hold a million that nobody could take for long. */
const maxLooked = 4096;
const unknown = 0;
const waiting = 1;
const gone = 2;
/** The null block: never full. */
const noBlock = 0;

export class WriteDownAhead {
  readonly #hashBytes: number;
  readonly #state: Uint8Array;
  readonly #hits: Uint8Array;
  /** The block before it in its chain; 0 at the root. Valid while that block has the hash that is recorded here as its parent's. */
  readonly #parent: Int32Array;
  /** Per block: its parent's hash and its own. */
  readonly #hashes: Buffer;
  readonly #isCached: (block: number, hash: Buffer) => boolean;
  /** Blocks that were proven since the last time something was taken, each once, in that order; as many as `#provenCount`. */
  readonly #proven: Int32Array;
  readonly #isListed: Uint8Array;
  #provenCount = 0;
  #lostBlocks = 0;

  /** @param isCached whether the pool finds a block by this hash */
  constructor(blockCount: number, hashBytes: number, isCached: (block: number, hash: Buffer) => boolean) {
    this.#hashBytes = hashBytes;
    this.#state = new Uint8Array(blockCount);
    this.#hits = new Uint8Array(blockCount);
    this.#parent = new Int32Array(blockCount);
    this.#proven = new Int32Array(blockCount);
    this.#isListed = new Uint8Array(blockCount);
    this.#hashes = Buffer.alloc(blockCount * 2 * hashBytes);
    this.#isCached = isCached;
  }

  /** Blocks that were reused, and filled with something else, before they were due: the tier does not have them. */
  get lostBlocks(): number {
    return this.#lostBlocks;
  }

  /**
   * Blocks `first`..`end`-1 of a chain are full and cached: computed now, or hit.
   * @param packed hashes of the chain from its root
   * @param table its blocks, all of them: a group of full attention
   */
  computed(packed: Buffer, table: readonly number[], first: number, end: number): void {
    const bytes = this.#hashBytes;
    invariant(end * bytes <= packed.length, () => `write-down: ${end} full blocks past the last hash`);
    for (let i = first; i < end; i++) {
      const block = table[i]!;
      invariant(block !== noBlock, () => `write-down: block ${i} of a chain is the null block`);
      const own = this.#own(block);
      const isHit = this.#state[block] !== unknown && own.compare(packed, i * bytes, (i + 1) * bytes) === 0;
      if (isHit) {
        this.#hits[block] = Math.min(this.#hits[block]! + 1, 255);
        if (this.#hits[block]! >= provenHits) this.#list(block);
      } else {
        if (this.#state[block] === waiting) this.#lostBlocks++;
        packed.copy(own, 0, i * bytes, (i + 1) * bytes);
        this.#hits[block] = 0;
      }
      this.#state[block] = waiting;
      this.#parent[block] = i === 0 ? noBlock : table[i - 1]!;
      if (i > 0) packed.copy(this.#parents(block), 0, (i - 1) * bytes, i * bytes);
      else this.#parents(block).fill(0);
    }
  }

  /**
   * What goes down now, at most `room` blocks: the proven ones, then those that are reused soon. They count as gone; what no
   * longer fits is due again the next time, unless it was only proven.
   * @param soon cached blocks that are reused next, soonest first
   */
  takeDue(soon: readonly number[], room: number): ChainPiece[] {
    const pieces: ChainPiece[] = [];
    let left = room;
    const take = (block: number): void => {
      if (!this.#isWaiting(block)) return;
      const chain = this.#chainTo(block).slice(0, left);
      left -= chain.length;
      for (const one of chain) this.#state[one] = gone;
      pieces.push(this.#piece(chain));
    };
    // Backwards: the last of a chain brings those before it along, as one piece.
    for (let looked = 0; looked < maxLooked && this.#provenCount > 0 && left > 0; looked++) {
      const block = this.#proven[--this.#provenCount]!;
      this.#isListed[block] = 0;
      if (this.#hits[block]! >= provenHits) take(block); // else something new has taken its place
    }
    for (const block of soon) {
      if (left <= 0) break;
      take(block);
    }
    if (left <= 0 && this.#provenCount > 0) {
      this.#provenCount = 0;
      this.#isListed.fill(0);
    }
    return pieces;
  }

  #list(block: number): void {
    if (this.#isListed[block]) return;
    this.#isListed[block] = 1;
    this.#proven[this.#provenCount++] = block;
  }

  /** The block and what comes before it in its chain and has not gone either, in the chain's order. */
  #chainTo(block: number): number[] {
    const chain = [block];
    for (let at = block; ; ) {
      const parent = this.#parent[at]!;
      if (parent === noBlock || !this.#isWaiting(parent)) break;
      if (!this.#own(parent).equals(this.#parents(at))) break; // reused: what it was has gone, or is lost
      chain.push(parent);
      at = parent;
    }
    return chain.reverse();
  }

  #piece(chain: readonly number[]): ChainPiece {
    const first = chain[0]!;
    const isRoot = this.#parent[first] === noBlock;
    const own = chain.map((block) => this.#own(block));
    return {
      hashes: Buffer.concat(isRoot ? own : [this.#parents(first), ...own]),
      firstBlock: isRoot ? 0 : 1,
      blockIds: chain,
    };
  }

  #isWaiting(block: number): boolean {
    return this.#state[block] === waiting && this.#isCached(block, this.#own(block));
  }

  #own(block: number): Buffer {
    const at = (2 * block + 1) * this.#hashBytes;
    return this.#hashes.subarray(at, at + this.#hashBytes);
  }

  #parents(block: number): Buffer {
    const at = 2 * block * this.#hashBytes;
    return this.#hashes.subarray(at, at + this.#hashBytes);
  }
}

/**
 * Our names of foreign blocks, by the engines' own: one table for all nodes beside such engines, since an engine's name stands for the tokens
 * of its block and of all before it, wherever the block lies. So what one node tells the tokens of is named for all that hold it.
 *
 * A name stays while somebody holds its block, and through one review more: a node that begins anew tells for a while what it holds. Reviews
 * come when as many names were added as are of use, and when room is short.
 *
 * A node can say of a block what is not so. Who tells it with other tokens after that shows that one of the two lies: the name is doubted,
 * nobody is credited with it, and it goes when a review finds that nobody holds it.
 */
import type { ChainHasher } from '@kvtier/identity';
import { type Keys, keysOfHashes } from '../keys.ts';
import { type Added, HashNames } from './hash-names.ts';
import type { Lies } from './lies.ts';
import type { NamesShare } from './names-budget.ts';
import { turnBlocks } from './slices.ts';

export interface NamesTableOptions {
  readonly hasher: ChainHasher;
  readonly budget: NamesShare;
  readonly maxBlocks: number;
  /** Somebody is credited with this block. */
  readonly isHeld: (low: number, high: number) => boolean;
  /** Nobody is to be credited with these blocks, by our names. */
  readonly onDoubt: (own: Keys) => void;
}

/** Who tells. */
export interface Author {
  /** From 1 on. */
  readonly number: number;
  readonly lies: Lies;
}

/** Why there is no name: the block before has none; it, or that one, is doubted; there is no room. */
export type Unnamed = 'parent' | 'doubted' | 'room';

/** Names are reviewed at most once in so many new ones. */
const reviewBlocks = 8_192;
/** Where room is short: at most once in so many told, of as many as there are. */
const pressedShift = 6;
/** In so many reviews, one after another, a name has to be of no use. */
const patience = 2;
const doubted = -1;

export class NamesTable {
  readonly #options: NamesTableOptions;
  readonly #names: HashNames;
  /** Since the last review: names that were added, and blocks that there was no room for. */
  #added = 0;
  #refused = 0;
  #reviewAt = reviewBlocks;
  /** Something was removed since. */
  #isReviewWorth = false;
  #isReviewing = false;

  constructor(options: NamesTableOptions) {
    this.#options = options;
    this.#names = new HashNames(options.hasher.hashBytes, options.maxBlocks, options.budget);
  }

  resize(maxBlocks: number): void {
    this.#names.resize(maxBlocks);
  }

  /** Somebody may hold less than before. */
  worthReview(): void {
    this.#isReviewWorth = true;
  }

  clear(): void {
    this.#names.clear();
    this.#reviewed(0);
  }

  /** The block has a name that nobody doubts. */
  isNamed(low: number, high: number): boolean {
    const mark = this.#names.markOf(low, high);
    return mark !== undefined && mark !== doubted;
  }

  /** Those of the engines' names that we have names for, by these. */
  own(keys: Keys): Keys {
    const own = new Int32Array(keys.length);
    let length = 0;
    for (let at = 0; at < keys.length; at += 2) {
      if (!this.isNamed(keys[at]!, keys[at + 1]!)) continue;
      [own[length], own[length + 1]] = keyOf(this.#names.find(keys[at]!, keys[at + 1]!)!);
      length += 2;
    }
    return own.subarray(0, length);
  }

  /** Blocks that follow each other, with their tokens, by our names: all of them, or those before the first that is doubted. */
  *name(keys: Keys, tokens: Int32Array, parent: Keys | undefined, author: Author): Generator<number, Keys | Unnamed> {
    const { hasher } = this.#options;
    const mark = parent === undefined ? 0 : this.#names.markOf(parent[0]!, parent[1]!);
    // What another rank or tier of this node has told of before, mostly.
    if (this.#isToldBy(keys, mark === undefined ? undefined : author)) return this.own(keys);
    if (mark === undefined) return 'parent';
    if (mark === doubted) return 'doubted';
    const before = parent && Buffer.from(this.#names.find(parent[0]!, parent[1]!)!);
    const hashes = hasher.hashBlocks(before ?? null, new Uint32Array(tokens));
    const sound = this.#compare(keys, hashes, author);
    if (sound < keys.length) return sound === 0 ? 'doubted' : this.#ownUntilDoubt(keys.subarray(0, sound));
    let added = this.#addAll(keys, hashes, author);
    if (added !== 'added' && this.#isWorthIt(keys.length / 2)) {
      for (let looks = 0; added !== 'added' && looks < patience; looks++) {
        yield* this.#review();
        added = this.#addAll(keys, hashes, author);
      }
      this.#isReviewWorth = added === 'added';
    }
    if (added === 'added') return this.#ownUntilDoubt(keys);
    const { budget } = this.#options;
    const spent = added === 'bytes' ? `${budget.maxBytes} bytes are taken` : `${this.#names.count} blocks have one`;
    author.lies.tell('no_room', () => `no room to name them, ${spent}; raise the coordinator's index.maxBytes`);
    return 'room';
  }

  /** Between two events. */
  *reviewWhereDue(): Generator<number, void> {
    if (this.#added >= this.#reviewAt) yield* this.#review();
  }

  /** Another one may have told otherwise while names were reviewed. */
  #ownUntilDoubt(keys: Keys): Keys {
    let end = 0;
    while (end < keys.length && this.isNamed(keys[end]!, keys[end + 1]!)) end += 2;
    return this.own(keys.subarray(0, end));
  }

  /** All of these have a name, and it is from there. undefined: from anywhere. */
  #isToldBy(keys: Keys, author: Author | undefined): boolean {
    for (let at = 0; at < keys.length; at += 2) {
      const mark = this.#names.markOf(keys[at]!, keys[at + 1]!);
      if (mark === undefined || mark === doubted || (author !== undefined && mark !== author.number)) return false;
    }
    return true;
  }

  /** Words before the first that stands for other tokens, or is doubted. */
  #compare(keys: Keys, hashes: Uint8Array, { lies }: Author): number {
    const { hashBytes } = this.#options.hasher;
    const others: Buffer[] = [];
    let sound = keys.length;
    for (let at = 0, from = 0; at < keys.length; at += 2, from += hashBytes) {
      const [low, high] = [keys[at]!, keys[at + 1]!];
      const known = this.#names.find(low, high);
      if (known === undefined) continue;
      const isDoubted = this.#names.markOf(low, high) === doubted;
      if (!isDoubted && known.compare(hashes, from, from + hashBytes) === 0) continue;
      sound = Math.min(sound, at);
      if (isDoubted) continue;
      others.push(known);
      this.#names.mark(low, high, doubted);
    }
    if (others.length > 0) {
      this.#options.onDoubt(keysOfHashes(Buffer.concat(others), hashBytes));
      lies.tell('tokens', () => 'other tokens of a block than another node told; nobody is credited with it');
      this.#isReviewWorth = true;
    }
    return sound;
  }

  /** All, or none. */
  #addAll(keys: Keys, hashes: Uint8Array, { number }: Author): Added {
    const { hashBytes } = this.#options.hasher;
    const fresh: number[] = [];
    for (let at = 0, from = 0; at < keys.length; at += 2, from += hashBytes) {
      if (this.#names.find(keys[at]!, keys[at + 1]!) !== undefined) continue;
      const added = this.#names.add(keys[at]!, keys[at + 1]!, hashes.subarray(from, from + hashBytes), number);
      if (added === 'added') {
        fresh.push(at);
        continue;
      }
      for (const one of fresh) this.#names.drop(keys[one]!, keys[one + 1]!);
      return added;
    }
    this.#added += fresh.length;
    return 'added';
  }

  /** Whether a review may make room for so many more, and costs little beside what was told since the last one. */
  #isWorthIt(blocks: number): boolean {
    this.#refused += blocks;
    if (!this.#isReviewWorth || this.#isReviewing) return false;
    return this.#added + this.#refused >= this.#names.count >>> pressedShift;
  }

  *#review(): Generator<number, void> {
    if (this.#isReviewing) return;
    this.#isReviewing = true;
    try {
      const review = this.#names.review(turnBlocks, (hash) => this.#options.isHeld(...keyOf(hash)), patience);
      let step = review.next();
      for (; step.done !== true; step = review.next()) yield turnBlocks;
      if (this.#names.count === 0) this.#names.clear();
      this.#reviewed(step.value);
    } finally {
      this.#isReviewing = false;
    }
  }

  #reviewed(ofUse: number): void {
    this.#added = 0;
    this.#refused = 0;
    this.#reviewAt = Math.max(reviewBlocks, ofUse);
  }
}

const keyOf = (hash: Buffer): [low: number, high: number] => [
  hash.readInt32BE(hash.length - 4),
  hash.readInt32BE(hash.length - 8),
];

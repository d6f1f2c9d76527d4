/**
 * Our names of what a node beside a foreign engine holds. It tells blocks by the engine's names, and those of which it was told the tokens
 * with these: they are hashed again, as prompts are. A name stands for its block in every namespace and tier, and stays when what the node
 * said is void, since it says nothing of who holds it: so a node that starts again, and knows the tokens of its disk no more, is
 * credited with it all the same, and one that follows a block that went is named. Names of no use are looked for when as many blocks came
 * as had one, and when room is short.
 *
 * A namespace counts once it tells tokens itself: those of groups with a window never do, and lack blocks that others have.
 */
import type { ChainHasher } from '@kvtier/identity';
import { keysOfHashes } from '../keys.ts';
import type { Keys, Parent } from '../kv-index.ts';
import { type Added, HashNames } from './hash-names.ts';
import type { Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import type { NamesBudget } from './names-budget.ts';
import type { PackedEvent } from './packed-events.ts';
import { slices, turnBlocks } from './slices.ts';
import { type Place, WaitingRuns } from './waiting-runs.ts';

/** How we hash, and where names have their bytes from. */
export interface Renaming {
  readonly hasher: ChainHasher;
  readonly budget: NamesBudget;
}

export interface NodeNamesOptions extends Renaming {
  readonly blockTokens: number;
  readonly maxBlocks: number;
  readonly lies: Lies;
  /** Blocks by our names. */
  readonly credit: (place: Place, keys: Keys, parent: Parent) => Generator<number, void>;
  /** Whether the node is credited with a block, by what is known now. */
  readonly credits: () => (low: number, high: number) => boolean;
  /** There was no room for the names of so many. */
  readonly onLeftOut: (blocks: number) => void;
  /** So many have none, as their tokens are not known. */
  readonly onUnnamed: (blocks: number) => void;
}

/** Names are reviewed at most once in so many blocks. */
const reviewBlocks = 8_192;
const maxNamespaces = 64;
/** All ranks of an engine store at once: who stored nothing for so long while another one did is of an engine of before. */
const formerS = 60;

interface Described extends Place {
  readonly keys: Keys;
  readonly tokens: Int32Array;
  /** undefined: they begin at the root. */
  readonly parent: Keys | undefined;
}

export class NodeNames {
  readonly #options: NodeNamesOptions;
  readonly #names: HashNames;
  readonly #waiting: WaitingRuns;
  /** Namespaces that tell tokens → when they stored something in memory last. */
  readonly #storedS = new Map<string, number>();
  /** Since all was void: blocks that were credited, and those that could not be. */
  #named = 0;
  #unnamed = 0;
  /** Blocks told since names were reviewed, while some may be of no use. */
  #toldSince = 0;
  #reviewAt = reviewBlocks;
  #isReviewWorth = false;

  constructor(options: NodeNamesOptions) {
    this.#options = options;
    const { hasher, maxBlocks, budget } = options;
    this.#names = new HashNames(hasher.hashBytes, maxBlocks, budget);
    this.#waiting = new WaitingRuns(budget);
  }

  /** It told blocks, and none of them could be named. */
  get isStrange(): boolean {
    return this.#named === 0 && this.#unnamed > 0;
  }

  /** Whose blocks an engine beside it needs now: a block is at hand where all of these have it. */
  current(): string[] {
    const newest = Math.max(0, ...this.#storedS.values());
    return [...this.#storedS].filter(([, atS]) => newest - atS <= formerS).map(([namespace]) => namespace);
  }

  get namespaces(): Iterable<string> {
    return this.#storedS.keys();
  }

  *stored(place: Place, event: PackedEvent, atS: number): Generator<number, void> {
    const { keys, tokens, parent } = event;
    const { blockTokens } = this.#options;
    const blocks = keys.length / 2;
    const isOfSize = event.blockTokens === 0 || event.blockTokens === blockTokens;
    const isTold = isOfSize && !event.hasExtra && blocks > 0 && tokens.length === blocks * blockTokens;
    if (isTold && this.#storedS.size < maxNamespaces && !this.#storedS.has(place.namespace))
      this.#storedS.set(place.namespace, 0);
    if (!isOfSize || !this.#storedS.has(place.namespace)) {
      this.#leave(blocks);
      yield 1;
      return;
    }
    if (place.medium === mediumNumbers.cpu) this.#storedS.set(place.namespace, atS);
    this.#toldSince += blocks;
    if (isTold) yield* this.#describe(place, keys, tokens, parent);
    else
      for (const slice of slices(keys)) {
        const own = this.own(slice);
        this.#leave((slice.length - own.length) / 2);
        yield* this.#credit(place, own, 'unknown');
      }
    if (this.#isReviewWorth && this.#toldSince >= this.#reviewAt) yield* this.#review();
    this.#waiting.rest();
  }

  removed(place: Place, keys: Keys): void {
    this.#isReviewWorth = true;
    for (let at = 0; at < keys.length && !this.#waiting.isEmpty; at += 2)
      if (this.#names.find(keys[at]!, keys[at + 1]!) === undefined) this.#waiting.removed(place, keys, at);
    this.#waiting.rest();
  }

  /** Of that place nothing is there any more. */
  cleared(place: Place): void {
    this.#waiting.cleared(place);
    this.#isReviewWorth = true;
  }

  /** What it said is void; it goes on telling. */
  voided(): void {
    this.#waiting.clear();
    for (const namespace of this.#storedS.keys()) this.#storedS.set(namespace, 0);
    this.#named = 0;
    this.#unnamed = 0;
    this.#toldSince = 0;
    this.#reviewAt = Math.max(reviewBlocks, this.#names.count);
    this.#isReviewWorth = true;
  }

  /** It tells nothing any more. */
  forget(): void {
    this.voided();
    this.#names.clear();
    this.#storedS.clear();
    this.#isReviewWorth = false;
  }

  /** Those of the node's names that we have names for, by these. */
  own(keys: Keys): Keys {
    const own = new Int32Array(keys.length);
    let length = 0;
    for (let at = 0; at < keys.length; at += 2) {
      const hash = this.#names.find(keys[at]!, keys[at + 1]!);
      if (hash === undefined) continue;
      own[length++] = hash.readInt32BE(hash.length - 4);
      own[length++] = hash.readInt32BE(hash.length - 8);
    }
    return own.subarray(0, length);
  }

  /** Blocks that follow each other, with their tokens; then those that waited for one of them. */
  *#describe(place: Place, keys: Keys, tokens: Int32Array, parent: Keys | undefined): Generator<number, void> {
    const { blockTokens } = this.#options;
    const runs: Described[] = [{ ...place, keys, tokens, parent }];
    for (let run = runs.pop(); run !== undefined; run = runs.pop()) {
      let before = run.parent;
      let at = 0;
      for (const slice of slices(run.keys)) {
        const rest = run.keys.subarray(at);
        const its = run.tokens.subarray((at / 2) * blockTokens);
        const all = yield* this.#name(slice, its, before);
        if (all === undefined) {
          if (before !== undefined && this.#isUnknown(before)) this.#wait(run, rest, its, before);
          else this.#options.onLeftOut(rest.length / 2);
          break;
        }
        const own = this.#waiting.hasGone ? this.#thoseHere(run, slice, all) : all;
        if (!this.#waiting.isEmpty)
          for (let i = 0; i < slice.length; i += 2) runs.push(...this.#waiting.take(slice, i));
        yield* this.#credit(run, own, own.length < all.length ? 'unknown' : this.#parentOf(before));
        before = slice.subarray(slice.length - 2);
        at += slice.length;
      }
    }
  }

  /** Without what was removed while it waited. */
  #thoseHere(place: Place, keys: Keys, own: Keys): Keys {
    return own.filter((_, i) => !this.#waiting.isGone(place, keys, i & ~1));
  }

  *#credit(place: Place, own: Keys, parent: Parent): Generator<number, void> {
    if (own.length === 0) return;
    this.#named += own.length / 2;
    yield* this.#options.credit(place, own, parent);
  }

  #wait(place: Place, keys: Keys, tokens: Int32Array, parent: Keys): void {
    this.#waiting.hold(place, keys, tokens, parent);
    this.#leave(keys.length / 2); // until the one before them comes, if it does
  }

  #leave(blocks: number): void {
    this.#unnamed += blocks;
    if (blocks > 0) this.#options.onUnnamed(blocks);
  }

  #isUnknown(key: Keys): boolean {
    return this.#names.find(key[0]!, key[1]!) === undefined;
  }

  #parentOf(before: Keys | undefined): Parent {
    if (before === undefined) return 'root';
    const own = this.own(before);
    return own.length === 0 ? 'unknown' : own;
  }

  /** Names of all of these. undefined: the one before them has none, or there is no room. */
  *#name(keys: Keys, tokens: Int32Array, parent: Keys | undefined): Generator<number, Keys | undefined> {
    // What another rank or tier has told of before, mostly.
    const known = this.own(keys);
    if (known.length === keys.length) return known;
    const { hasher, budget, blockTokens, lies } = this.#options;
    const before = parent && this.#names.find(parent[0]!, parent[1]!);
    if (parent && before === undefined) return undefined;
    const count = keys.length / 2;
    const words = new Uint32Array(tokens.subarray(0, count * blockTokens));
    const hashes = hasher.hashBlocks(before ? Buffer.from(before) : null, words);
    let added = this.#addAll(keys, hashes);
    if (added !== 'added' && this.#isReviewWorth) {
      yield* this.#review();
      added = this.#addAll(keys, hashes);
    }
    if (added === 'added') return keysOfHashes(hashes, hasher.hashBytes);
    const spent = added === 'bytes' ? `${budget.maxBytes} bytes are taken` : `${this.#names.count} blocks have one`;
    lies.tell('no_room', () => `no room to name them, ${spent}; raise the coordinator's index.maxBytes`);
    return undefined;
  }

  /** All, or none. */
  #addAll(keys: Keys, hashes: Uint8Array): Added {
    const { hashBytes } = this.#options.hasher;
    const fresh: number[] = [];
    for (let at = 0, from = 0; at < keys.length; at += 2, from += hashBytes) {
      if (this.#names.find(keys[at]!, keys[at + 1]!) !== undefined) continue;
      const added = this.#names.add(keys[at]!, keys[at + 1]!, hashes.subarray(from, from + hashBytes));
      if (added === 'added') {
        fresh.push(at);
        continue;
      }
      for (const one of fresh) this.#names.drop(keys[one]!, keys[one + 1]!);
      return added;
    }
    return 'added';
  }

  *#review(): Generator<number, void> {
    this.#isReviewWorth = false;
    this.#toldSince = 0;
    const isCredited = this.#options.credits();
    for (const _ of this.#names.review(turnBlocks, (hash) => isCredited(...keyOf(hash)))) yield turnBlocks;
    if (this.#names.count === 0) this.#names.clear();
    this.#reviewAt = Math.max(reviewBlocks, this.#names.count);
  }
}

const keyOf = (hash: Buffer): [low: number, high: number] => [
  hash.readInt32BE(hash.length - 4),
  hash.readInt32BE(hash.length - 8),
];

/**
 * Bringing blocks into the arena before anybody loads them.
 *
 * Invariants: what a prefetch brings is pinned until the prefetch ends, so that its tail does not push out its head, and is let go
 * then, over several turns (block-turns.ts). What all of them brought and nobody has used yet is bounded by `maxPrefetchedBytes`, so that guesses never take
 * more than that from blocks that were used; pinned blocks they cannot take at all. While a slot is free they take from nobody: what was
 * brought first is then forgotten, and counts no more; else requests that were given up would end all prefetching in an arena that never fills. Ends by itself, is cancelled, or ends
 * with its session.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { BlockTurns } from './block-turns.ts';
import type { Counters } from './counters.ts';
import type { FetchClient, FetchFailure, FetchRequest, NamespaceState } from './fetches.ts';
import type { Pins } from './pins.ts';
import type { Steps } from './steps.ts';

/** Blocks that prefetches brought and nobody has used: what guesses cost. */
export class Prefetched {
  readonly #limitBytes: number;
  readonly #counters: Counters;
  readonly #unused = new Map<string, number>();
  #bytes = 0;

  constructor(limitBytes: number, counters: Counters) {
    this.#limitBytes = limitBytes;
    this.#counters = counters;
  }

  /** On the way or in the arena, not used yet. */
  get bytes(): number {
    return this.#bytes;
  }

  /** @param isFree whether one more block would take no other's place, and is at nobody's cost */
  hasRoom(bytes: number, isFree: () => boolean): boolean {
    for (const [key, unusedBytes] of this.#unused) {
      if (this.#isWithin(bytes) || !isFree()) break;
      this.#unused.delete(key);
      this.#bytes -= unusedBytes;
      this.#counters.add('prefetch.blocks.forgotten');
    }
    return this.#isWithin(bytes);
  }

  #isWithin(bytes: number): boolean {
    return this.#bytes + bytes <= this.#limitBytes;
  }

  reserve(bytes: number): void {
    this.#bytes += bytes;
  }

  giveBack(bytes: number): void {
    this.#bytes -= bytes;
  }

  /** What was reserved for it is in the arena now. */
  add(namespace: Namespace, hash: HashKey, bytes: number): void {
    const key = namespace.key + hash;
    if (this.#unused.has(key)) this.#bytes -= bytes;
    else this.#unused.set(key, bytes);
  }

  used(namespace: Namespace, hash: HashKey): void {
    if (this.#take(namespace, hash)) this.#counters.add('prefetch.blocks.used');
  }

  /** It left the arena. */
  removed(namespace: Namespace, hash: HashKey): void {
    if (this.#take(namespace, hash)) this.#counters.add('prefetch.blocks.wasted');
  }

  #take(namespace: Namespace, hash: HashKey): boolean {
    if (this.#unused.size === 0) return false;
    const key = namespace.key + hash;
    const bytes = this.#unused.get(key);
    if (bytes === undefined) return false;
    this.#unused.delete(key);
    this.#bytes -= bytes;
    return true;
  }
}

export interface PrefetchOptions {
  readonly prefetched: Prefetched;
  readonly counters: Counters;
  readonly tenant: number;
  readonly pins: Pins;
  readonly blockTurns: BlockTurns;
  /** One more block of it would take no other's place. */
  readonly isFree: () => boolean;
  /** Nothing is read for it any more. */
  readonly onEnd: () => void;
}

/** One prefetch: the blocks of a chain that a lower tier holds and the arena does not. */
export class Prefetch implements FetchClient {
  readonly state: NamespaceState;
  readonly priority = 'prefetch';
  readonly tenant: number;
  readonly #hashes: readonly HashKey[];
  readonly #options: PrefetchOptions;
  #at = 0;
  /** Blocks on their way. */
  #open = 0;
  #ended = false;
  readonly #pinned: HashKey[] = [];

  constructor(state: NamespaceState, hashes: readonly HashKey[], options: PrefetchOptions) {
    this.state = state;
    this.#hashes = hashes;
    this.tenant = options.tenant;
    this.#options = options;
  }

  next(): FetchRequest | undefined {
    if (this.#at === this.#hashes.length) this.#stop();
    else if (!this.#options.prefetched.hasRoom(this.state.payloadBytes, this.#options.isFree)) {
      this.#options.counters.add('prefetch.refused.budget', this.#hashes.length - this.#at);
      this.#stop();
    }
    return this.#at === this.#hashes.length ? undefined : { index: this.#at, hash: this.#hashes[this.#at]! };
  }

  advance(): void {
    this.#at++;
    this.#open++;
    this.#options.prefetched.reserve(this.state.payloadBytes);
  }

  wants(): boolean {
    return !this.#ended;
  }

  arrived(index: number, tier: string): void {
    const { prefetched, counters, pins } = this.#options;
    const { namespace, payloadBytes } = this.state;
    const hash = this.#hashes[index]!;
    counters.add(tier === 'arena' ? 'prefetch.blocks.already' : `prefetch.blocks.from.${tier}`);
    // A load that waited for the same read has it already.
    if (tier === 'arena' || pins.isPinned(namespace, hash)) prefetched.giveBack(payloadBytes);
    else prefetched.add(namespace, hash, payloadBytes);
    if (tier !== 'arena' && !this.#ended) {
      pins.pin(namespace, hash);
      this.#pinned.push(hash);
    }
    this.#done();
  }

  failed(_index: number, reason: FetchFailure): void {
    const { prefetched, counters } = this.#options;
    prefetched.giveBack(this.state.payloadBytes);
    counters.add(`prefetch.failed.${reason}`);
    this.#stop(); // what lies behind a gap is of no use
    this.#done();
  }

  /** Nothing new is read for it. Returns how many blocks that leaves out. */
  cancel(): number {
    const left = this.#hashes.length - this.#at;
    if (left > 0) this.#options.counters.add('prefetch.blocks.cancelled', left);
    this.#stop();
    this.#end();
    return left;
  }

  #done(): void {
    this.#open--;
    if (this.#at === this.#hashes.length && this.#open === 0) this.#end();
  }

  #stop(): void {
    this.#at = this.#hashes.length;
    if (this.#open === 0) this.#end();
  }

  #end(): void {
    if (this.#ended) return;
    this.#ended = true;
    if (this.#pinned.length > 0) this.#options.blockTurns.add(this.#unpinning(), () => {});
    this.#options.onEnd();
  }

  /** From the end on: whoever needs room meanwhile can have what came last, and nothing before it. */
  *#unpinning(): Steps<void> {
    for (let hash = this.#pinned.pop(); hash !== undefined; hash = this.#pinned.pop()) {
      this.#options.pins.unpin(this.state.namespace, hash);
      yield;
    }
  }
}

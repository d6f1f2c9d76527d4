/**
 * Bringing blocks into the arena before anybody loads them.
 *
 * Invariants: what a prefetch brings is pinned until the prefetch ends or somebody uses it, so that its tail does not push out its head; when
 * it ends it is let go over several turns (block-turns.ts). What all of them brought and nobody has used yet is bounded by
 * `maxPrefetchedBytes`, so that guesses never take more than that from blocks that were used, and never pin more; pinned blocks they cannot
 * take at all. While a slot is free they take from nobody: of what was let go, the first is then forgotten, and counts no more; else requests
 * that were given up would end all prefetching in an arena that never fills. Ends by itself, is cancelled, or ends with its session.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { BlockTurns } from './block-turns.ts';
import type { Counters } from './counters.ts';
import type { FetchClient, FetchFailure, FetchRequest, NamespaceState } from './fetches.ts';
import type { Pins } from './pins.ts';
import type { Steps } from './steps.ts';

/** Who pins a block that nobody has used. */
interface Bringer {
  /** An engine has it now. */
  used(hash: HashKey): void;
}

/** Blocks that prefetches brought and nobody has used: what guesses cost. */
export class Prefetched {
  readonly #limitBytes: number;
  readonly #counters: Counters;
  /** In the arena, pinned. */
  readonly #kept = new Map<string, { readonly bytes: number; readonly by: Bringer }>();
  /** In the arena, and nobody's: what was let go first comes first. */
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

  /** What was reserved for it is in the arena now; `by`: pins it, until it is used or let go of. */
  add({ key }: Namespace, hash: HashKey, bytes: number, by?: Bringer): void {
    this.#take(key, hash); // counted before
    if (by === undefined) this.#unused.set(key + hash, bytes);
    else this.#kept.set(key + hash, { bytes, by });
  }

  /** It is pinned no more; `isGone`: nor is it listed. */
  letGo(namespace: Namespace, hash: HashKey, isGone: boolean): void {
    this.#unkeep(namespace.key + hash);
    if (isGone) this.removed(namespace, hash);
  }

  used({ key }: Namespace, hash: HashKey): void {
    if (this.#kept.size > 0) this.#unkeep(key + hash)?.used(hash);
    if (this.#take(key, hash)) this.#counters.add('prefetch.blocks.used');
  }

  /** It left the arena. What is pinned takes its place there until it is let go of. */
  removed({ key }: Namespace, hash: HashKey): void {
    if (this.#take(key, hash)) this.#counters.add('prefetch.blocks.wasted');
  }

  /** It is nobody's now; returns whose it was. */
  #unkeep(name: string): Bringer | undefined {
    const kept = this.#kept.get(name);
    if (kept === undefined) return undefined;
    this.#kept.delete(name);
    this.#unused.set(name, kept.bytes);
    return kept.by;
  }

  #take(space: string, hash: HashKey): boolean {
    if (this.#unused.size === 0) return false;
    const bytes = this.#unused.get(space + hash);
    if (bytes === undefined) return false;
    this.#unused.delete(space + hash);
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
export class Prefetch implements FetchClient, Bringer {
  readonly state: NamespaceState;
  readonly priority = 'prefetch';
  readonly tenant: number;
  readonly #hashes: readonly HashKey[];
  readonly #options: PrefetchOptions;
  #at = 0;
  /** Blocks on their way. */
  #open = 0;
  #ended = false;
  /** By it, in the order in which they came. */
  readonly #pinned = new Set<HashKey>();

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
    // Who pins it already has it, or has brought it: then it counts, or did.
    if (tier === 'arena' || pins.isPinned(namespace, hash)) prefetched.giveBack(payloadBytes);
    else if (this.#ended) prefetched.add(namespace, hash, payloadBytes);
    else {
      pins.pin(namespace, hash);
      this.#pinned.add(hash);
      prefetched.add(namespace, hash, payloadBytes, this);
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

  /** It is no guess any more: a load pins it, too, or the engine has it itself. */
  used(hash: HashKey): void {
    this.#pinned.delete(hash);
    this.#options.pins.unpin(this.state.namespace, hash);
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
    if (this.#pinned.size > 0) this.#options.blockTurns.add(this.#unpinning(), () => {});
    this.#options.onEnd();
  }

  /** From the end on: whoever needs room meanwhile can have what came last, and nothing before it. */
  *#unpinning(): Steps<void> {
    const { prefetched, pins } = this.#options;
    const { namespace } = this.state;
    for (const hash of [...this.#pinned].reverse()) {
      if (!this.#pinned.delete(hash)) continue; // used meanwhile
      prefetched.letGo(namespace, hash, pins.isLeaving(namespace, hash));
      pins.unpin(namespace, hash);
      yield;
    }
  }
}

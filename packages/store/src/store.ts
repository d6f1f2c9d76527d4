/**
 * The store of a cache node: an arena on top, lower tiers below it in the order of their speed.
 *
 *     sessions ── Holdings ──┬─ lookup, reserve, commit ──▶ arena ──WriteDown──▶ disk
 *                            └─ load ──▶ Fetcher ◀──────────────────read─────────┘
 *
 * Pure control plane: it moves offsets and hashes, never bytes (law 4). Single-threaded; every public call is one turn
 * and leaves all invariants intact. What the world does to a tier ends here as a shorter prefix or a counted refusal.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Tier, TierStats } from '@kvtier/tiers';
import { Counters } from './counters.ts';
import type { Failpoint } from './failpoints.ts';
import { Fetcher } from './fetcher.ts';
import { Holdings } from './holdings.ts';
import { defaultLimits, type StoreLimits } from './limits.ts';
import { type NamespaceState, Namespaces } from './namespaces.ts';
import { Pins } from './pins.ts';
import type { ArenaTop, Clock, Log, ReadHeader } from './ports.ts';
import { WriteDown } from './write-down.ts';

export interface StoreOptions {
  readonly arena: ArenaTop;
  /** Fastest first. */
  readonly lower: readonly Tier[];
  readonly readHeader: ReadHeader;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits?: Partial<StoreLimits>;
  readonly failpoint?: Failpoint | undefined;
}

/** What the parts of the store share. */
export interface StoreParts {
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly clock: Clock;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  readonly failpoint: Failpoint | undefined;
  readonly fetcher: Fetcher;
  readonly writeDowns: readonly WriteDown[];
  readonly namespaces: Namespaces;
  readonly locate: (state: NamespaceState, hash: HashKey) => Tier | undefined;
  /** These blocks were used, in chain order. */
  readonly touch: (namespace: Namespace, hashes: readonly HashKey[]) => void;
  readonly removeCorrupt: (namespace: Namespace, hashes: readonly HashKey[]) => void;
}

export interface TierSpan {
  readonly tier: string;
  readonly count: number;
}

export interface LookupResult {
  /** Blocks held from the first hash on, without a gap. */
  readonly held: number;
  /** Where, in chain order; counts sum to `held`. */
  readonly spans: readonly TierSpan[];
  /** Expected time to bring all of it into the arena. */
  readonly estimatedUs: number;
}

export class Store {
  readonly counters = new Counters();
  readonly #lower: readonly Tier[];
  readonly #parts: StoreParts;

  constructor(options: StoreOptions) {
    const { arena, lower, clock, log, failpoint } = options;
    const limits = { ...defaultLimits(arena.stats().capacityBytes), ...options.limits };
    const shared = { arena, pins: new Pins(arena), clock, log, limits, counters: this.counters, failpoint };
    this.#lower = lower;
    const fetcher: Fetcher = new Fetcher({ ...shared, lower, readHeader: options.readHeader }, () =>
      this.#pumpWriteDowns(),
    );
    const writeDowns = lower.map((tier) => new WriteDown({ ...shared, tier, hasDemand: () => fetcher.hasDemand }));
    this.#parts = {
      ...shared,
      fetcher,
      writeDowns,
      namespaces: new Namespaces(),
      locate: (state, hash) => this.#locate(state, hash),
      touch: (namespace, hashes) => this.touch(namespace, hashes),
      removeCorrupt: (namespace, hashes) => this.#removeCorrupt(namespace, hashes),
    };
  }

  /** A new session's holdings; end them with `end`. KvError PROTOCOL when the block size contradicts the namespace. */
  open(namespace: Namespace, payloadBytes: number, blockTokens: number): Holdings {
    return new Holdings(this.#parts, this.#parts.namespaces.acquire(namespace, payloadBytes), blockTokens);
  }

  /** The longest held prefix. Counts as use: parents end up at least as recent as their children. */
  lookup(state: NamespaceState, hashes: readonly HashKey[]): LookupResult {
    const { arena, fetcher, counters } = this.#parts;
    const counts = new Map<string, number>();
    const spans: { tier: string; count: number }[] = [];
    let held = 0;
    arena.lookup(state.namespace, hashes); // for its own count of hits and misses
    for (const hash of hashes) {
      const inArena = arena.get(state.namespace, hash)?.payloadBytes === state.payloadBytes;
      const tier = inArena ? arena.name : this.#locate(state, hash)?.name;
      if (tier === undefined) break;
      held++;
      counts.set(tier, (counts.get(tier) ?? 0) + 1);
      const last = spans.at(-1);
      if (last?.tier === tier) last.count++;
      else spans.push({ tier, count: 1 });
    }
    this.touch(state.namespace, hashes.slice(0, held));
    counters.add('lookup.calls');
    counters.add('lookup.blocks.asked', hashes.length);
    let estimatedUs = 0;
    for (const [tier, count] of counts) {
      counters.add(`lookup.blocks.held.${tier}`, count);
      // Tiers deliver side by side: the slowest one decides.
      if (tier !== arena.name)
        estimatedUs = Math.max(estimatedUs, fetcher.estimateUs(tier, count * state.payloadBytes));
    }
    return { held, spans, estimatedUs };
  }

  /** These blocks were used, in chain order. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    if (hashes.length === 0) return;
    this.#parts.arena.touch(namespace, hashes);
    for (const tier of this.#lower) tier.touch(namespace, hashes);
  }

  stats(): { readonly tiers: readonly TierStats[]; readonly counters: Readonly<Record<string, number>> } {
    const { arena, pins, fetcher, writeDowns, namespaces } = this.#parts;
    const gauges: Record<string, number> = {
      'fetch.inflight_bytes': fetcher.inFlightBytes,
      'namespaces.open': namespaces.count,
      'arena.pinned_blocks': pins.blockCount,
    };
    for (const [index, tier] of this.#lower.entries()) {
      gauges[`writedown.${tier.name}.pending_bytes`] = writeDowns[index]!.pendingBytes;
    }
    return {
      tiers: [arena, ...this.#lower].map((tier) => tier.stats()),
      counters: { ...this.counters.snapshot(), ...gauges },
    };
  }

  checkIntegrity(): void {
    for (const tier of [this.#parts.arena, ...this.#lower]) tier.checkIntegrity();
  }

  /** Writes down what is queued, within its time, then closes all tiers, the arena last. Sessions have ended before. */
  async close(): Promise<void> {
    this.#parts.failpoint?.('store.close.before');
    await Promise.all(this.#parts.writeDowns.map((writeDown) => writeDown.close()));
    for (const tier of this.#lower) await tier.close();
    await this.#parts.arena.close();
  }

  #locate(state: NamespaceState, hash: HashKey): Tier | undefined {
    if (this.#parts.pins.isLeaving(state.namespace, hash)) return undefined;
    const one = [hash];
    return this.#lower.find((tier) => tier.lookup(state.namespace, one) === 1 && !this.#parts.fetcher.isStuck(tier));
  }

  #removeCorrupt(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.counters.add('release.corrupt', hashes.length);
    this.#parts.pins.removeCorrupt(namespace, hashes);
    for (const tier of this.#lower) tier.remove(namespace, hashes, 'corrupt');
  }

  #pumpWriteDowns(): void {
    for (const writeDown of this.#parts.writeDowns) writeDown.pump();
  }
}

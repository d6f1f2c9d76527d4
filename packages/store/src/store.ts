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
import { Recency } from './recency.ts';
import { type Chain, hashCount, Residency } from './residency.ts';
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
  readonly recency: Recency;
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
  readonly #names: readonly string[];
  readonly #parts: StoreParts;
  readonly #residency = new Residency();
  /** Of each tier, by bit: blocks that lookups found there first, and blocks that they asked it for in vain. */
  readonly #hits: number[];
  readonly #misses: number[];

  constructor(options: StoreOptions) {
    const { arena, lower, clock, log, failpoint } = options;
    const limits = { ...defaultLimits(arena.stats().capacityBytes), ...options.limits };
    const shared = { arena, pins: new Pins(arena), clock, log, limits, counters: this.counters, failpoint };
    this.#lower = lower;
    const tiers = [arena, ...lower];
    for (const [bit, tier] of tiers.entries()) this.#residency.follow(tier, bit);
    this.#names = tiers.map(({ name }) => name);
    this.#hits = tiers.map(() => 0);
    this.#misses = tiers.map(() => 0);
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
      recency: new Recency({ tiers, residency: this.#residency, clock, limits, counters: this.counters }),
      removeCorrupt: (namespace, hashes) => this.#removeCorrupt(namespace, hashes),
    };
  }

  /** A new session's holdings; end them with `end`. KvError PROTOCOL when the block size contradicts the namespace. */
  open(namespace: Namespace, payloadBytes: number, blockTokens: number): Holdings {
    return new Holdings(this.#parts, this.#parts.namespaces.acquire(namespace, payloadBytes), blockTokens);
  }

  /** The longest held prefix, from one pass over one index. Counts as use: parents end up at least as recent as their children. */
  lookup(state: NamespaceState, chain: Chain): LookupResult {
    const { pins, recency, fetcher, counters } = this.#parts;
    const available = this.#available();
    const { held: listed, found } = this.#residency.lookup(state.namespace, chain, available, this.#nowS());
    const held = pins.firstLeaving(state.namespace, chain, listed);
    const counts = new Array<number>(this.#hits.length).fill(0);
    const spans: { tier: string; count: number }[] = [];
    for (let at = 0; at < held; ) {
      const bit = lowestBit(found[at]! & available);
      const first = at;
      while (at < held && lowestBit(found[at]! & available) === bit) at++;
      counts[bit]! += at - first;
      spans.push({ tier: this.#names[bit]!, count: at - first });
    }
    recency.used(state.namespace, chain, held, found);
    const asked = hashCount(chain);
    counters.add('lookup.calls');
    counters.add('lookup.blocks.asked', asked);
    let estimatedUs = 0;
    let missing = held < asked ? held + 1 : held;
    for (const [bit, count] of counts.entries()) {
      this.#hits[bit]! += count;
      missing -= count;
      if ((available & (1 << bit)) !== 0) this.#misses[bit]! += missing;
      if (count === 0) continue;
      counters.add(`lookup.blocks.held.${this.#names[bit]}`, count);
      // Tiers deliver side by side: the slowest one decides.
      if (bit > 0)
        estimatedUs = Math.max(estimatedUs, fetcher.estimateUs(this.#names[bit]!, count * state.payloadBytes));
    }
    return { held, spans, estimatedUs };
  }

  stats(): { readonly tiers: readonly TierStats[]; readonly counters: Readonly<Record<string, number>> } {
    const { arena, pins, fetcher, writeDowns, namespaces } = this.#parts;
    const gauges: Record<string, number> = {
      'fetch.inflight_bytes': fetcher.inFlightBytes,
      'namespaces.open': namespaces.count,
      'arena.pinned_blocks': pins.blockCount,
      'index.blocks': this.#residency.count,
      'index.bytes': this.#residency.bytes,
      'touch.pending_blocks': this.#parts.recency.pendingBlocks,
    };
    for (const [index, tier] of this.#lower.entries()) {
      gauges[`writedown.${tier.name}.pending_bytes`] = writeDowns[index]!.pendingBytes;
    }
    return {
      tiers: [arena, ...this.#lower].map((tier, bit) => ({
        ...tier.stats(),
        hits: this.#hits[bit]!,
        misses: this.#misses[bit]!,
      })),
      counters: { ...this.counters.snapshot(), ...gauges },
    };
  }

  checkIntegrity(): void {
    const tiers = [this.#parts.arena, ...this.#lower];
    for (const tier of tiers) tier.checkIntegrity();
    this.#residency.checkIntegrity(tiers);
  }

  /** Writes down what is queued, within its time, then closes all tiers, the arena last. Sessions have ended before. */
  async close(): Promise<void> {
    this.#parts.failpoint?.('store.close.before');
    this.#parts.recency.close();
    await Promise.all(this.#parts.writeDowns.map((writeDown) => writeDown.close()));
    for (const tier of this.#lower) await tier.close();
    await this.#parts.arena.close();
    this.#residency.close();
  }

  /** The fastest lower tier that holds the block and answers. */
  #locate(state: NamespaceState, hash: HashKey): Tier | undefined {
    if (this.#parts.pins.isLeaving(state.namespace, hash)) return undefined;
    const tiers = this.#residency.tiers(state.namespace, hash) & this.#available() & ~1;
    return tiers === 0 ? undefined : this.#lower[lowestBit(tiers) - 1];
  }

  /** The tiers that may be asked now, as bits. */
  #available(): number {
    let bits = 1;
    for (const [index, tier] of this.#lower.entries()) if (!this.#parts.fetcher.isStuck(tier)) bits |= 2 << index;
    return bits;
  }

  #nowS(): number {
    return Math.floor(this.#parts.clock.nowUs() / 1e6);
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

const lowestBit = (bits: number): number => 31 - Math.clz32(bits & -bits);

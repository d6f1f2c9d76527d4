/**
 * The store of a cache node: an arena on top, lower tiers below it in the order of their speed.
 *
 *     sessions ── Holdings ──┬─ lookup ──▶ Residency (one index, follows all tiers)
 *                            ├─ reserve, commit ──▶ arena ──WriteDown──▶ disk, redis, s3
 *                            └─ load, prefetch ──▶ Fetcher ◀──────────read──────┘
 *
 * Pure control plane: it moves offsets and hashes, never bytes (law 4). Single-threaded; every public call is one turn
 * and leaves all invariants intact. What the world does to a tier ends here as a shorter prefix or a counted refusal.
 */
import { invariant } from '@kvtier/errors';
import { createAdmission } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Tier } from '@kvtier/tiers';
import { Awaiting } from './awaiting.ts';
import { BlockTurns } from './block-turns.ts';
import { type Chain, hashCount } from './chain-words.ts';
import { Counters } from './counters.ts';
import { Expiry } from './expiry.ts';
import { Fetcher } from './fetcher.ts';
import type { NamespaceState } from './fetches.ts';
import { HeldSketch } from './held-sketch.ts';
import { Holdings } from './holdings.ts';
import { defaultLimits } from './limits.ts';
import { Namespaces } from './namespaces.ts';
import { defaultPlan, type OpenOptions, type StoreOptions, type StoreParts } from './parts.ts';
import { Pins } from './pins.ts';
import { Prefetched } from './prefetch.ts';
import { Recency } from './recency.ts';
import { maxTiers, Residency } from './residency.ts';
import { type StoreStats, tierReports } from './stats.ts';
import { inOneTurn, isStepEnd, type Steps, stepping } from './steps.ts';
import { Suspects } from './suspects.ts';
import { Tenants } from './tenants.ts';
import { type Ticket, Tickets } from './tickets.ts';
import { TierGate } from './tier-gate.ts';
import { TierTtl } from './tier-ttl.ts';
import { WriteDown } from './write-down.ts';

export interface TierSpan {
  readonly tier: string;
  readonly count: number;
}

export interface LookupResult {
  /** Blocks held: from the first hash on; by `lookupAll`, of all hashes. */
  readonly held: number;
  /** Where, in chain order; a gap has tier '', all other counts sum to `held`. */
  readonly spans: readonly TierSpan[];
  /** Expected time to bring all of it into the arena. */
  readonly estimatedUs: number;
}

/** All tiers but peers: these come from other hosts' memory, and are faster than computing or not by the link alone. */
const nearBits = (tiers: readonly Pick<Tier, 'name'>[]): number =>
  tiers.reduce((bits, { name }, bit) => bits | (name === 'peer' ? 0 : 1 << bit), 0);

const lowestBit = (bits: number): number => 31 - Math.clz32(bits & -bits);

export class Store {
  readonly counters = new Counters();
  readonly #lower: readonly Tier[];
  readonly #names: readonly string[];
  readonly #gates: readonly TierGate[];
  readonly #promote: readonly boolean[];
  readonly #parts: StoreParts;
  readonly #residency: Residency;
  readonly #tenants: Tenants;
  readonly #expiry: Expiry;
  readonly #suspects: Suspects;
  /** Of lower tiers that have one. */
  readonly #ttls: readonly (TierTtl | undefined)[];
  /** Of each tier, by bit: blocks that lookups found there first, and blocks that they asked it for in vain. */
  readonly #hits: number[];
  readonly #misses: number[];

  constructor(options: StoreOptions) {
    const { arena, lower, clock, log, failpoint, readHeader } = options;
    const { counters } = this;
    const limits = { ...defaultLimits(arena.stats().capacityBytes), ...options.limits };
    const pins = new Pins(arena, (namespace, hash) => this.#tenants.unpinned(namespace, hash));
    const blockTurns = new BlockTurns(limits.unpinBatchBlocks);
    const makeRoom = (): boolean => blockTurns.take(stepping.blocks);
    arena.whenFull?.(makeRoom);
    const wallS = (): number => Math.floor(clock.wallMs() / 1000);
    const isOver = (expiresS: number): boolean => expiresS !== 0 && expiresS <= wallS();
    const tickets = new Tickets(limits.maxShownTickets);
    const shared = { arena, pins, tickets, clock, log, limits, counters, failpoint, wallS, isOver };
    const tiers = [arena, ...lower];
    const sketch = options.held && new HeldSketch(options.held, nearBits(tiers));
    this.#residency = new Residency(
      (record) => this.#expiry.delete(record),
      undefined,
      sketch && ((word, before, after) => sketch.change(word, before, after)),
    );
    this.#lower = lower;
    this.#names = tiers.map(({ name }) => name);
    this.#hits = tiers.map(() => 0);
    this.#misses = tiers.map(() => 0);
    this.#gates = lower.map((tier, at) => new TierGate(tier, at + 1, lower.length, clock, limits, options.runningUs));
    for (const gate of this.#gates) gate.onOpened = (reason) => this.#breakerOpened(gate, reason);
    this.#tenants = new Tenants({
      quotas: options.quotas ?? {},
      ...{ tierNames: this.#names, counters },
      recordOf: (namespace, hash) => this.#residency.recordOf(namespace, hash),
      parentOf: (namespace, hash) => {
        const block = arena.get(namespace, hash);
        return block === undefined ? null : (readHeader(block.slot)?.parent ?? null);
      },
      isPinned: (namespace, hash) => pins.isPinned(namespace, hash),
      makeRoom,
      evict: (bit, namespace, hash) => tiers[bit]!.remove(namespace, [hash], 'evicted'),
    });
    this.#expiry = new Expiry({
      clock,
      batchBlocks: limits.touchBatchBlocks,
      remove: (namespace, hashes) => this.#expired(namespace, hashes),
    });
    this.#suspects = new Suspects({ ...shared, verify: options.verify });
    const prefetched = new Prefetched(limits.maxPrefetchedBytes, counters);
    const plans = lower.map((tier) => ({ ...defaultPlan, ...options.plans?.[tier.name] }));
    this.#promote = plans.map(({ promote }) => promote);
    this.#ttls = plans.map(({ ttlSeconds }, at) =>
      ttlSeconds === undefined
        ? undefined
        : new TierTtl(lower[at]!, ttlSeconds, clock, limits.touchBatchBlocks, counters),
    );
    const ownerOf = (namespace: Namespace, hash: HashKey): number => this.#residency.tenant(namespace, hash);
    const writeDowns = this.#gates.map((gate, at) => {
      const { write: policy, admission, settleMs = 0 } = plans[at]!;
      return new WriteDown({
        ...shared,
        gate,
        policy,
        settleMs,
        admission: createAdmission(admission, arena.stats().capacityBytes),
        ownerOf,
        tenants: this.#tenants,
      });
    });
    const fetcher = new Fetcher({
      ...shared,
      readHeader,
      tenants: this.#tenants,
      ownerOf,
      locate: (state, hash, tried) => this.#locate(state, hash, tried),
      onPromoted: (state, hash, from) => this.#promoted(state, hash, from),
      onIdle: () => this.#pumpWriteDowns(),
    });
    const namespaces = new Namespaces();
    const awaiting = new Awaiting({
      ...{ namespaces, clock, limits, counters },
      locate: (state, hash) => this.#locate(state, hash, 0),
      isListed: (namespace, hash) => this.#residency.tiers(namespace, hash) !== 0,
    });
    this.#parts = {
      ...shared,
      fetcher,
      prefetched,
      namespaces,
      awaiting,
      blockTurns,
      tenants: this.#tenants,
      recency: new Recency({ tiers: this.#touchables(tiers), residency: this.#residency, clock, limits, counters }),
      locate: (state, hash) => this.#locate(state, hash, 0),
      ownerOf,
      onCommitted: (state, hash) => this.#committed(state, hash),
      onUsed: (state, hash, fresh) => this.#used(state, hash, fresh),
      pumpWriteDowns: () => this.#pumpWriteDowns(),
      sweep: () => this.#expiry.sweep(),
      removeIfOver: (namespace, hash) => this.#removeIfOver(namespace, hash),
      suspect: (namespace, hashes) => this.#suspects.add(namespace, hashes),
      settled: (namespace, hashes) => this.#suspects.settled(namespace, hashes),
      writeDowns,
    };
    for (const [bit, tier] of tiers.entries()) this.#follow(tier, bit);
  }

  /** A new session's holdings; end them with `end`. KvError PROTOCOL when sizes of blocks or hashes contradict the namespace. */
  open(namespace: Namespace, payloadBytes: number, blockTokens: number, options: OpenOptions = {}): Holdings {
    const { namespaces, tenants } = this.#parts;
    // Whose blocks contradict the namespace is heard first, and changes nothing of what tenants hold.
    const state = namespaces.acquire(namespace, payloadBytes, options.hashBytes);
    try {
      const tenant = tenants.open(options.tenant ?? '', namespace, payloadBytes);
      return new Holdings(this.#parts, state, { blockTokens, tenant, ttlS: options.ttlS ?? 0 });
    } catch (error) {
      namespaces.release(state);
      throw error;
    }
  }

  /**
   * Somebody shows the ticket of a pin, which ends. Returns how many blocks are let go here. `hash`: one of its blocks, by which the
   * peers are found that are told when the pin is none of this node's; null: a peer has told it.
   */
  endPin(namespace: Namespace, ticket: Ticket, hash: HashKey | null): number {
    const count = this.#parts.tickets.show(namespace, ticket);
    this.counters.add(count === undefined ? 'pin.tickets.unknown' : 'pin.tickets.shown');
    if (count === undefined && hash !== null) {
      const bytes = Buffer.from(ticket, 'latin1');
      for (const tier of this.#lower) tier.endPin?.(namespace, bytes, hash);
    }
    return count ?? 0;
  }

  /** The longest held prefix, from one pass over one index. Counts as use: parents end up at least as recent as their children. */
  lookup(state: NamespaceState, chain: Chain): LookupResult {
    const { pins, recency } = this.#parts;
    const available = this.#available();
    const { held: listed, found } = this.#residency.lookup(state.namespace, chain, available, this.#parts.wallS());
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
    const estimatedUs = this.#counted(state, hashCount(chain), counts);
    return { held, spans, estimatedUs };
  }

  /** What is held of all hashes, wherever in the chain: groups with a sliding window keep only the ends of chains. */
  *lookingUpAll(state: NamespaceState, hashes: readonly HashKey[]): Steps<LookupResult> {
    const { pins, recency, isOver } = this.#parts;
    const available = this.#available();
    const counts = new Array<number>(this.#hits.length).fill(0);
    const spans: { tier: string; count: number }[] = [];
    const held: HashKey[] = [];
    const found: number[] = [];
    for (const [at, hash] of hashes.entries()) {
      if (at > 0 && isStepEnd(at, hashes.length)) yield;
      const gone = pins.isLeaving(state.namespace, hash) || isOver(this.#residency.expiresS(state.namespace, hash));
      const tiers = gone ? 0 : this.#residency.tiers(state.namespace, hash) & available;
      const name = tiers === 0 ? '' : this.#names[lowestBit(tiers)]!;
      if (tiers !== 0) {
        counts[lowestBit(tiers)]!++;
        held.push(hash);
        found.push(tiers);
      }
      const last = spans.at(-1);
      if (last?.tier === name) last.count++;
      else spans.push({ tier: name, count: 1 });
    }
    recency.used(state.namespace, held, held.length, Uint8Array.from(found));
    // A window needs the end of a prefix alone: what is not held in front of what is was not missed.
    const behind = spans.at(-1)?.tier === '' ? spans.at(-1)!.count : 0;
    const estimatedUs = this.#counted(state, held.length + behind, counts);
    return { held: held.length, spans, estimatedUs };
  }

  /** All of it in this turn. */
  lookupAll(state: NamespaceState, hashes: readonly HashKey[]): LookupResult {
    return inOneTurn(this.lookingUpAll(state, hashes));
  }

  /** Fulfilled when the read that brings this block from this tier has ended, well or not; undefined: there is none. */
  arriving(namespace: Namespace, hash: HashKey, tier: string): Promise<void> | undefined {
    const state = this.#parts.namespaces.get(namespace);
    const fetch = state?.fetching.get(hash);
    if (state === undefined || fetch?.gate.tier.name !== tier) return undefined;
    return new Promise((resolve) => {
      const [arrived, failed] = [() => resolve(), () => resolve()];
      const watcher = { state, priority: 'prefetch', tenant: 0, wants: () => false, arrived, failed } as const;
      fetch.waiters.push({ client: { ...watcher, next: () => undefined, advance: () => {} }, index: 0 });
    });
  }

  stats(): StoreStats {
    const { arena, pins, fetcher, writeDowns, namespaces, awaiting, prefetched, recency } = this.#parts;
    const gauges: Record<string, number> = {
      'fetch.inflight_bytes': fetcher.inFlightBytes,
      'namespaces.open': namespaces.count,
      'await.blocks': awaiting.count,
      'arena.pinned_blocks': pins.blockCount,
      'prefetch.unused_bytes': prefetched.bytes,
      'index.blocks': this.#residency.count,
      'index.bytes': this.#residency.bytes,
      'touch.pending_blocks': recency.pendingBlocks,
      'expiry.blocks': this.#expiry.count,
      'expiry.bytes': this.#expiry.bytes,
      ...this.#tenants.gauges(),
    };
    const counters = this.counters.snapshot();
    return {
      tiers: tierReports([arena, ...this.#lower], this.#gates, writeDowns, counters, this.#hits, this.#misses),
      counters: { ...counters, ...gauges, ...pendingOf(writeDowns, this.#lower) },
    };
  }

  checkIntegrity(): void {
    const tiers = [this.#parts.arena, ...this.#lower];
    for (const tier of tiers) tier.checkIntegrity();
    this.#residency.checkIntegrity(tiers);
    this.#expiry.checkIntegrity();
    this.#parts.awaiting.checkIntegrity();
    invariant(
      this.#expiry.count === this.#residency.expiringCount,
      'store: an expiry is queued for no block, or none is',
    );
    for (const [at, ttl] of this.#ttls.entries()) {
      if (ttl === undefined) continue;
      ttl.checkIntegrity();
      // While the tier is being listed, or taken out, the index knows of fewer or of more.
      const { blocks } = this.#lower[at]!.stats();
      const agrees = this.#residency.settled ? ttl.count === blocks : ttl.count <= this.#residency.count;
      invariant(agrees, () => `store: ${ttl.count} times to live of ${blocks} blocks`);
    }
  }

  /** Writes down what is queued, within its time, then closes all tiers, the arena last. Sessions have ended before. */
  async close(): Promise<void> {
    this.#parts.failpoint?.('store.close.before');
    this.#parts.recency.close();
    this.#parts.fetcher.close();
    this.#parts.awaiting.close();
    this.#expiry.clear();
    for (const ttl of this.#ttls) ttl?.clear();
    await Promise.all(this.#parts.writeDowns.map((writeDown) => writeDown.close()));
    await this.#suspects.close();
    this.#residency.close();
    await Promise.all(this.#lower.map((tier) => tier.close())); // one that hangs does not take the others' time
    await this.#parts.arena.close();
  }

  #follow(tier: Tier, bit: number): void {
    const { prefetched, writeDowns } = this.#parts;
    this.#residency.follow(
      tier,
      bit,
      (record, namespace, hash, held, expiresS) => {
        this.#ttls[bit - 1]?.changed(record, namespace, hash, held);
        if (held) {
          const owner = this.#residency.tenant(namespace, hash);
          this.#parts.namespaces.learn(namespace, hash.length);
          if (expiresS !== 0) this.#ends(record, namespace, hash, expiresS);
          this.#tenants.stored(bit, record, namespace, hash, owner === 0 ? this.#adopt(namespace, hash) : owner);
          if (bit !== 0) this.#parts.awaiting.listed(namespace, hash);
          return;
        }
        this.#tenants.removed(bit, record);
        if (bit !== 0) return;
        prefetched.removed(namespace, hash);
        for (const writeDown of writeDowns) writeDown.gone(namespace, hash);
      },
      () => {
        this.#tenants.cleared(bit);
        this.#ttls[bit - 1]?.clear();
      },
    );
  }

  /** A block that is nobody's belongs to who publishes it. */
  #adopt(namespace: Namespace, hash: HashKey): number {
    const { publishing } = this.#tenants;
    if (publishing !== 0) {
      this.#residency.mark(namespace, hash, publishing, this.#residency.expiresS(namespace, hash));
    }
    return publishing;
  }

  /** What hears of recency, by bit: the tier, and the tenants' own order in it. */
  #touchables(tiers: readonly Tier[]): Pick<Tier, 'touch'>[] {
    return tiers.map((tier, bit) => ({
      touch: (namespace: Namespace, hashes: readonly HashKey[]): void => {
        tier.touch(namespace, hashes);
        this.#tenants.touch(bit, namespace, hashes);
      },
    }));
  }

  /** The fastest lower tier that holds the block and answers, but for those in `tried`. */
  #locate(state: NamespaceState, hash: HashKey, tried: number): TierGate | undefined {
    const { namespace } = state;
    if (this.#parts.pins.isLeaving(namespace, hash)) return undefined;
    const tiers = this.#residency.tiers(namespace, hash) & ~tried & ~1;
    if (tiers === 0) return undefined;
    if (this.#parts.isOver(this.#residency.expiresS(namespace, hash))) return undefined;
    const bits = tiers & this.#available();
    return bits === 0 ? undefined : this.#gates[lowestBit(bits) - 1];
  }

  /**
   * Counts a lookup. What no faster tier gives of the `asked` blocks is each tier's to give: a hit or a miss of it, also behind the end
   * of the prefix, where nobody looks, since its engine computes that. Returns the time to bring what lies below the arena.
   */
  #counted(state: NamespaceState, asked: number, counts: readonly number[]): number {
    const { counters } = this.#parts;
    const available = this.#available();
    counters.add('lookup.calls');
    counters.add('lookup.blocks.asked', asked);
    let estimatedUs = 0;
    let missing = asked;
    for (const [bit, count] of counts.entries()) {
      this.#hits[bit]! += count;
      missing -= count;
      if ((available & (1 << bit)) !== 0) this.#misses[bit]! += missing;
      if (count === 0) continue;
      counters.add(`lookup.blocks.held.${this.#names[bit]}`, count);
      // Tiers deliver side by side: the slowest one decides.
      if (bit > 0) estimatedUs = Math.max(estimatedUs, this.#gates[bit - 1]!.estimateUs(count * state.payloadBytes));
    }
    return estimatedUs;
  }

  /** The tiers that may be asked now, as bits. */
  #available(): number {
    let bits = 1;
    for (const { bit, available } of this.#gates) if (available) bits |= 1 << bit;
    return bits;
  }

  #committed(state: NamespaceState, hash: HashKey): void {
    this.#spread(state, hash, maxTiers, true);
    this.#parts.awaiting.arrived(state, hash);
  }

  /** An engine uses a block of the arena; `fresh`: it has just come there, see `#promoted`. */
  #used(state: NamespaceState, hash: HashKey, fresh: boolean): void {
    this.#parts.prefetched.used(state.namespace, hash);
    if (!fresh) this.#spread(state, hash, maxTiers);
  }

  /** What came from a slow tier goes to the faster ones, too, where their plan says so. */
  #promoted(state: NamespaceState, hash: HashKey, from: TierGate): void {
    this.#parts.awaiting.arrived(state, hash);
    this.#spread(state, hash, from.bit);
  }

  /** Offer a block of the arena, perhaps just made there, to the tiers below bit `end` that do not hold it. */
  #spread(state: NamespaceState, hash: HashKey, end: number, isMade = false): void {
    const { namespace, payloadBytes } = state;
    const tiers = this.#residency.tiers(namespace, hash);
    for (const [at, writeDown] of this.#parts.writeDowns.entries()) {
      if (at + 1 >= end) return;
      if ((tiers & (2 << at)) !== 0) continue;
      const isInSlower = tiers >> (at + 2) !== 0;
      // What is selective chooses by use, wherever else the block is.
      const chooses = writeDown.policy === 'selective' && end === maxTiers;
      if (isMade || !isInSlower || chooses) writeDown.offer(namespace, hash, payloadBytes);
      else if (this.#promote[at]) writeDown.promote(namespace, hash, payloadBytes);
    }
  }

  /** A tier of this node holds an object with this end. The earliest end that is known of a name counts for all of it. */
  #ends(record: number, namespace: Namespace, hash: HashKey, expiresS: number): void {
    const before = this.#residency.expiresS(namespace, hash);
    const endS = before === 0 ? expiresS : Math.min(before, expiresS);
    this.#residency.mark(namespace, hash, this.#residency.tenant(namespace, hash), endS);
    this.#expiry.set(record, namespace, hash, endS * 1000 - this.#parts.clock.wallMs());
  }

  #removeIfOver(namespace: Namespace, hash: HashKey): void {
    if (this.#expiry.count === 0 || !this.#parts.isOver(this.#residency.expiresS(namespace, hash))) return;
    this.#expired(namespace, [hash]);
  }

  /**
   * They leave what is this node's own. What others share is left alone: the object there may be another one, made by somebody
   * without a time to live; if it is ours it has the same end, and whoever reads it sees that (`Fetcher`).
   */
  #expired(namespace: Namespace, hashes: readonly HashKey[]): void {
    const { pins, isOver } = this.#parts;
    const over = hashes.filter((hash) => isOver(this.#residency.expiresS(namespace, hash)));
    this.counters.add('expired.blocks', over.length);
    pins.remove(namespace, over, 'asked');
    for (const tier of this.#lower) if (!tier.supports.shared) tier.remove(namespace, over, 'asked');
    for (const hash of hashes) {
      const record = this.#residency.recordOf(namespace, hash);
      if (record === -1) continue;
      const expiresS = this.#residency.expiresS(namespace, hash);
      if (!isOver(expiresS)) {
        // The wall clock was put back meanwhile.
        if (expiresS !== 0) this.#ends(record, namespace, hash, expiresS);
        continue;
      }
      this.#residency.mark(namespace, hash, this.#residency.tenant(namespace, hash), 0);
      this.#expiry.delete(record);
    }
  }

  #breakerOpened({ tier }: TierGate, reason: string): void {
    this.counters.add(`breaker.opened.${tier.name}`);
    this.#parts.log.warn({ tier: tier.name, reason }, 'a tier does not deliver; it is left alone for a while');
  }

  #pumpWriteDowns(): void {
    for (const writeDown of this.#parts.writeDowns) writeDown.pump();
  }
}

function pendingOf(writeDowns: readonly WriteDown[], lower: readonly Tier[]): Record<string, number> {
  return Object.fromEntries(
    writeDowns.map(({ pendingBytes }, at) => [`writedown.${lower[at]!.name}.pending_bytes`, pendingBytes]),
  );
}

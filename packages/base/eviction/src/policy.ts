/**
 * The interface of an eviction policy. Pure: no I/O, no clock of its own, replayable on traces. An entry is a small
 * integer that its owner assigns and may reuse after `remove`; the owner keeps everything else about it.
 *
 * (The shape is that of CacheLib's navy `EvictionPolicy`: track, touch, evict, and nothing about storage.)
 */

/** An owner's number for one thing that may be evicted: an index into the owner's own table, from 0, dense. */
export type EntryIndex = number;

export interface InsertHint {
  /**
   * The entry that this one depends on, when it is tracked too: a block's parent in its chain. A policy keeps the
   * dependent no warmer than it, so that chains shrink from their tail.
   */
  readonly parent?: EntryIndex | undefined;
  /**
   * That one stands far behind what came last. Where no touch brings it forward, the dependent comes as what has no parent does; a policy of
   * that kind looks for dependents before it chooses. Whoever says so refreshes the chain before, or walks pass over all of it at once.
   */
  readonly comesLate?: boolean;
  /**
   * What the entry is, in 52 bits of its hash: policies that remember what they evicted (ghosts) know it again by this, as
   * entries' numbers are reused.
   */
  readonly name?: number | undefined;
  /** What it costs to make the entry anew, in any unit that all entries share; default 1. For the cost-aware policy. */
  readonly cost?: number | undefined;
  /** Default 1: all entries are of one size. For the cost-aware policy. */
  readonly bytes?: number | undefined;
}

export interface EvictionPolicy {
  readonly name: BlockPolicyName;
  /** Entries tracked. */
  readonly count: number;
  insert(entry: EntryIndex, nowUs: number, hint?: InsertHint): void;
  touch(entry: EntryIndex, nowUs: number): void;
  /**
   * Something is about to follow the chain that it is part of, children before parents: it is in use, and this counts as no use of it. The
   * end of the chain is then no colder than what came last, or, where no touch changes a place, the rest of it is passed over already. False:
   * so it was before.
   */
  refresh(entry: EntryIndex): boolean;
  remove(entry: EntryIndex): void;
  has(entry: EntryIndex): boolean;
  /**
   * It may not go for long: it stays tracked and is neither asked about nor chosen before `unpark`, which puts it into the order again.
   * Where a touch makes an entry the warmest there is no need of it.
   */
  park?(entry: EntryIndex): void;
  unpark?(entry: EntryIndex): void;
  /**
   * The entry to evict next among those that may be; undefined when none may. Does not remove it. `isInUse`: of those that may not, which
   * ones stay for long, so that where nothing childless may go their parents may go before them; default: all.
   */
  victim(mayEvict: (entry: EntryIndex) => boolean, isInUse?: (entry: EntryIndex) => boolean): EntryIndex | undefined;
  /** As `victim` and `remove`, up to `count` times, in one walk: what may not go is passed over once, not for each. */
  evict(count: number, mayEvict: (entry: EntryIndex) => boolean): EntryIndex[];
  /**
   * Entries in the order in which they would be evicted, as things stand when the first is asked for: what changes later does not change it,
   * so that a long walk can go on in pieces. Before the first there is a copy of the order, and no walk.
   */
  coldestFirst(): Iterable<EntryIndex>;
  /** Throws InvariantError when its structure is broken. */
  checkIntegrity(): void;
}

/** The policies that can be configured. */
export const policyNames = ['lru', 'lfu', 'fifo', 's3-fifo'] as const;
export type PolicyName = (typeof policyNames)[number];

/** Those of an engine's own blocks, where what an entry costs to compute is known. */
export const blockPolicyNames = [...policyNames, 'cost-aware'] as const;
export type BlockPolicyName = (typeof blockPolicyNames)[number];

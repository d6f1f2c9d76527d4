/** What a store is made of, and what its parts share. */
import type { AdmissionName } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Clock, Log } from '@kvtier/runtime';
import type { Tier } from '@kvtier/tiers';
import type { Awaiting } from './awaiting.ts';
import type { BlockTurns } from './block-turns.ts';
import type { Counters } from './counters.ts';
import type { Failpoint } from './failpoints.ts';
import type { Fetcher } from './fetcher.ts';
import type { NamespaceState } from './fetches.ts';
import type { HeldTable } from './held-sketch.ts';
import type { StoreLimits } from './limits.ts';
import type { Namespaces } from './namespaces.ts';
import type { Pins } from './pins.ts';
import type { ArenaTop, ReadHeader, VerifyBlocks } from './ports.ts';
import type { Prefetched } from './prefetch.ts';
import type { Recency } from './recency.ts';
import type { Quotas, Tenants } from './tenants.ts';
import type { Tickets } from './tickets.ts';
import type { TierGate } from './tier-gate.ts';
import type { WriteDown, WritePolicy } from './write-down.ts';

/** What the store does with one lower tier. */
export interface TierPlan {
  readonly write: WritePolicy;
  /** Asked by write 'selective' only. */
  readonly admission: AdmissionName;
  /** What is loaded from a slower tier is written here, too. */
  readonly promote: boolean;
  /** Write-down begins when so long no block was committed: a prompt that is being computed needs the processors. Default 0: at once. */
  readonly settleMs?: number | undefined;
  /** Blocks leave the tier so long after they came; default: never. */
  readonly ttlSeconds?: number | undefined;
}

export const defaultPlan: TierPlan = { write: 'through', admission: 'second-touch', promote: true };

export interface StoreOptions {
  readonly arena: ArenaTop;
  /** Fastest first. */
  readonly lower: readonly Tier[];
  /** By tier name; what is not said is as in `defaultPlan`. A tier that cannot be written is not. */
  readonly plans?: Readonly<Record<string, Partial<TierPlan> | undefined>> | undefined;
  readonly quotas?: Quotas | undefined;
  readonly readHeader: ReadHeader;
  readonly verify: VerifyBlocks;
  readonly clock: Clock;
  /** As the clock's, but it stands still while this process does, or is kept waiting for a processor; default: the clock's. */
  readonly runningUs?: (() => number) | undefined;
  readonly log: Log;
  readonly limits?: Partial<StoreLimits>;
  readonly failpoint?: Failpoint | undefined;
  /** Where engines read what is held; default: nowhere. */
  readonly held?: HeldTable | undefined;
}

/** What a session says of its blocks. */
export interface OpenOptions {
  /** Who pays for them; default "". */
  readonly tenant?: string;
  /** They are removed so many seconds after they were made; default 0: never. */
  readonly ttlS?: number;
  /** Of its hashes; all sessions of a namespace have the same. Default: not said. */
  readonly hashBytes?: number;
}

export interface StoreParts {
  readonly arena: ArenaTop;
  readonly pins: Pins;
  readonly tickets: Tickets;
  readonly blockTurns: BlockTurns;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits: StoreLimits;
  readonly counters: Counters;
  readonly failpoint: Failpoint | undefined;
  readonly fetcher: Fetcher;
  readonly awaiting: Awaiting;
  readonly prefetched: Prefetched;
  readonly writeDowns: readonly WriteDown[];
  readonly namespaces: Namespaces;
  readonly tenants: Tenants;
  readonly recency: Recency;
  readonly locate: (state: NamespaceState, hash: HashKey) => TierGate | undefined;
  /** Whose block it is; 0: nobody's, or of a tenant without a quota. */
  readonly ownerOf: (namespace: Namespace, hash: HashKey) => number;
  /** A block has just been published by a session. */
  readonly onCommitted: (state: NamespaceState, hash: HashKey) => void;
  /** An engine uses a block of the arena; `fresh`: it has just come there from a lower tier. */
  readonly onUsed: (state: NamespaceState, hash: HashKey, fresh: boolean) => void;
  readonly pumpWriteDowns: () => void;
  /** Remove what has expired by now; one batch. */
  readonly sweep: () => void;
  /** The second of Unix time. */
  readonly wallS: () => number;
  /** The end of an object (`Header.expiresS`) is over. */
  readonly isOver: (expiresS: number) => boolean;
  /** Remove this block if it has expired and was not removed yet. */
  readonly removeIfOver: (namespace: Namespace, hash: HashKey) => void;
  /** An engine says that these blocks of the arena did not match their checksums. They are pinned. */
  readonly suspect: (namespace: Namespace, hashes: readonly HashKey[]) => void;
  /** Resolves when it is known which of these are sound; undefined: none of them is being looked at. */
  readonly settled: (namespace: Namespace, hashes: readonly HashKey[]) => Promise<unknown> | undefined;
}

/** A block on its way into the arena, and who waits for it. */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { ReadPriority, TierGate } from './tier-gate.ts';

export interface NamespaceState {
  readonly namespace: Namespace;
  readonly payloadBytes: number;
  /** Reserved by a session that is alive and not yet committed. */
  readonly writing: Set<HashKey>;
  /** Of each block the read that was begun last. */
  readonly fetching: Map<HashKey, Fetch>;
  /** Who waits for a block that cannot be had now: the first in its list. */
  readonly awaited: Map<HashKey, Waiter>;
  holders: number;
}

/** Why a block did not arrive, in the words of LoadDone. */
export type FetchFailure = 'missing' | 'corrupt' | 'capacity' | 'tier';

export interface FetchRequest {
  /** The client's own, given back. */
  readonly index: number;
  readonly hash: HashKey;
}

/** A load or a prefetch, as the fetcher sees it. */
export interface FetchClient {
  readonly state: NamespaceState;
  readonly priority: ReadPriority;
  /** Who pays for what it brings, unless the block has an owner. */
  readonly tenant: number;
  /** The block that it wants next, in chain order; undefined: nothing more, it leaves the ring. */
  next(): FetchRequest | undefined;
  /** That block is being taken care of: `arrived` or `failed` will follow. */
  advance(): void;
  /** It still waits for this block. */
  wants(index: number): boolean;
  /** The block is in the arena now: pin it in this call. */
  arrived(index: number, tier: string): void;
  failed(index: number, reason: FetchFailure): void;
}

export interface Fetch {
  readonly hash: HashKey;
  readonly slot: number;
  readonly priority: ReadPriority;
  readonly tenant: number;
  gate: TierGate;
  /** Tiers that were asked, as bits. */
  tried: number;
  readonly waiters: { readonly client: FetchClient; readonly index: number }[];
}

/** A load, as far as it waits. */
export interface AwaitClient {
  readonly state: NamespaceState;
  /** How many blocks its session waits for. */
  readonly session: { awaited: number };
  /** The block is in the arena now: pin it in this call. It is not waited for any more. */
  came(index: number): void;
  /** A lower tier can give it now; `fetch` follows. It is not waited for any more. */
  listed(index: number): void;
  /** Have fetched what was `listed`. */
  fetch(): void;
}

/** One block that one load waits for; a link in the list of those who wait for that block. */
export interface Waiter {
  readonly client: AwaitClient;
  readonly index: number;
  readonly hash: HashKey;
  previous: Waiter | undefined;
  next: Waiter | undefined;
}

/**
 * The interface of every tier, and the words it uses. A tier holds objects: header + payload, as docs/formats.md has
 * them, keyed by namespace and chain hash. Bytes travel only between the tier and slots of the arena (law 4).
 *
 * Contract, tested by `conformance.ts` against every implementation:
 *  - all operations are batched, and report per block; they throw only for defects, never for what the world does;
 *  - a read that does not match namespace, hash, layout and checksum is 'corrupt': counted, removed, never delivered;
 *  - an object that is sound, and of a version, codec or flags that this program does not know, is 'missing', and no damage: a newer
 *    program wrote it. It is not listed here any more, counted apart (`foreign_blocks`), and left to who can read it;
 *  - an object that is larger than the slot it was asked into is 'missing' for who asked, and no damage. The slots of this node's
 *    engines say what size its blocks are: it is not listed here any more. What others hold, too, is left to them;
 *  - bytes held never exceed `capacityBytes`, at any instant and after any crash (law 3);
 *  - what `write` reported as 'stored' is found by `lookup` until evicted or removed; a write in flight is not;
 *  - every read and write ends within the tier's own time limit ('failed', 'refused'); when `onDone` was called for a slot,
 *    the tier never touches that slot again, whatever still arrives from a disk or a socket;
 *  - when `read` settles, by a rejection, too, no byte can arrive any more in any of its slots: what it has started has ended.
 *    The caller gives the slots away in that turn. A tier that cannot know does not settle;
 *  - a tier that the world broke (ENOSPC, EIO, a server that is gone) goes out of service: lookups miss, writes are
 *    'refused', stats say why. It tries by itself, with a backoff, to come back, and then lists what is still there.
 */
import type { HashKey, Namespace } from '@kvtier/identity';

/** What a tier is, for the store and for `conformance.ts`, which tests what is claimed here. */
export interface TierSupports {
  /** Contents survive the process. */
  readonly persistent: boolean;
  /** Other processes change the contents, too: blocks come and go without this process doing it. */
  readonly shared: boolean;
  /** false: `write` refuses everything; contents come from elsewhere (a peer). */
  readonly writable: boolean;
  /** A write into a full tier makes room by evicting; false: it is refused. */
  readonly evicts: boolean;
}

/**
 * A change of what `lookup` says. 'cleared': nothing is held any more, in any namespace (the tier went out of service, or
 * its server lost its contents); then `namespace` is null and `hashes` empty.
 */
export type TierChange =
  | {
      readonly kind: 'stored' | 'removed';
      readonly namespace: Namespace;
      readonly hashes: readonly HashKey[];
      /** Of 'stored': the end of each object (`Header.expiresS`), where the tier knows it; what is not there: it does not. */
      readonly expiresS?: readonly number[] | undefined;
    }
  | { readonly kind: 'cleared'; readonly namespace: null; readonly hashes: readonly [] };

/** One follower of `Tier.followInPages`. */
export interface Following {
  /** Tells more of what is held now, some thousand blocks. False: all has been told. Not to be called by the listener. */
  next(): boolean;
  end(): void;
}

/** One object in a slot of the arena. `slot` is the offset of its header; the payload follows the header. */
export interface SlotBlock {
  readonly hash: HashKey;
  readonly slot: number;
}

export type WriteStatus = 'stored' | 'held' | 'refused';
export type ReadStatus = 'ready' | 'missing' | 'corrupt' | 'failed';
/** Whose word the sizes of slots are: this node's own, or somebody else's. */
export type SlotSizes = 'known' | 'guessed';
/**
 * 'misfit': too large for this node's engines; 'foreign': a newer program wrote it. Elsewhere it may be what it has to be: a tier that
 * others share keeps it for them.
 */
export type RemoveReason = 'corrupt' | 'evicted' | 'asked' | 'misfit' | 'foreign';

export interface TierStats {
  readonly tier: string;
  readonly blocks: number;
  /** Bytes held against the budget, preallocated space included. */
  readonly bytes: number;
  readonly capacityBytes: number;
  readonly hits: number;
  readonly misses: number;
  readonly evictions: number;
  readonly corrupt: number;
  readonly refused: number;
  readonly inService: boolean;
  /** Also of one in service: why it takes no writes, or what part of it is out. "": all is well. */
  readonly outOfServiceReason: string;
  /** Numbers that only this kind of tier has, by metric name ("saved_bytes"). */
  readonly detail?: Readonly<Record<string, number>>;
}

export interface Tier {
  readonly name: string;
  readonly supports: TierSupports;

  /** Blocks held from the first hash on, without a gap. In memory and synchronous: it is on the path of a lookup. */
  lookup(namespace: Namespace, hashes: readonly HashKey[]): number;
  /** Recency: these blocks were used, chain order. Parents end up more recent than their children. */
  touch(namespace: Namespace, hashes: readonly HashKey[]): void;
  /** Store objects out of arena slots. The slots stay untouched by the caller until the promise resolves. */
  write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]>;
  /**
   * Bring objects into arena slots, verified. `onDone` is called once per block, as each ends, in any order; the promise
   * resolves after the last. An object that is larger than its slot is 'missing', and a tier below the arena does not list it any more:
   * blocks of a namespace are of one size, and this one would be in the way of its name for ever. It stays where `sizes` are 'guessed':
   * those of slots that were made for somebody else, by his word.
   */
  read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes?: SlotSizes,
  ): Promise<void>;
  /**
   * Bytes of slot that reading this block takes; undefined: not held, or not known before it is read. `guess`: taken for it
   * where it is not known, or what it takes at least if that is more.
   */
  objectBytes?(namespace: Namespace, hash: HashKey, guess?: number): number | undefined;
  /** Somebody has shown the ticket of a pin that other nodes behind this tier, which hold this block, may keep for a session of theirs. */
  endPin?(namespace: Namespace, ticket: Buffer, hash: HashKey): void;
  /** Forget blocks; `reason` "corrupt" is counted as such. Returns how many were held. */
  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number;
  /**
   * Tell `listener` of every change of what `lookup` says, in order, from inside the turn that changes it; first, before
   * `follow` returns, everything that is held now, as 'stored'. A listener must not call back into the tier. Returns the
   * end of it.
   */
  follow(listener: (change: TierChange) => void): () => void;
  /**
   * The same for what may hold millions: changes come as they are, what is held comes a page at a time, when it is asked for. So a
   * block may be told as 'stored' twice, and as 'removed' before it was told at all. `onMore`: there are pages once more, after all had
   * been told; without it they come by themselves.
   */
  followInPages?(listener: (change: TierChange) => void, onMore?: () => void): Following;
  stats(): TierStats;
  /** Throws InvariantError when index, accounting and policy disagree. */
  checkIntegrity(): void;
  /** Waits for what is in flight; persistent tiers leave a checkpoint. */
  close(): Promise<void>;
}

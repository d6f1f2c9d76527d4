/** What the node's end of the session link is made with. */
import type { Buffer } from 'node:buffer';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Store } from '@kvtier/placement';
import type { Clock, Log } from '@kvtier/runtime';
import type { SessionLimits } from './limits.ts';

/** Who keeps token ids, u32 little-endian; `parent` is null at the root of a chain. */
export interface TokenSink {
  learn(namespace: Namespace, hash: HashKey, parent: HashKey | null, tokens: Buffer): void;
}

export interface SessionServerOptions {
  readonly socketPath: string;
  readonly store: Store;
  readonly arenaPath: string;
  readonly arenaBytes: number;
  readonly arenaId: bigint;
  /** Whether `arenaPath` still leads to it; absent: it does. */
  readonly isArenaThere?: () => boolean;
  /** Larger blocks are refused at Attach. */
  readonly maxPayloadBytes: number;
  /** Bytes of a header, between a slot and its payload. */
  readonly headerBytes: number;
  /** Differs after every start. */
  readonly bootEpoch: bigint;
  /** Whether blocks of the node with this boot epoch can come here; absent: they can. */
  readonly mayCome?: (epoch: bigint) => boolean;
  /** Counts of the process, told with the store's. */
  readonly gauges?: () => Readonly<Record<string, number>>;
  /** SO_PEERCRED of a socket's file descriptor. */
  readonly peerCredentials: (fd: number) => { readonly pid: number; readonly uid: number };
  /** Who is in this group may attach, too; null, also when absent: only our own user and root. */
  readonly group?: number | null;
  /** All groups of the process at the other end of a socket. */
  readonly peerGroups?: (fd: number) => readonly number[];
  /** Whether somebody holds this byte of the arena's lock file; null, also when absent: there is none. */
  readonly isByteHeld?: ((byte: number) => boolean) | null;
  /** That file says which blocks are held; default: no. */
  readonly tellsHeld?: boolean;
  /** An engine has attached, and says how many tokens a block of its namespace has. */
  readonly onAttach?: (namespace: Namespace, blockTokens: number) => void;
  /** Where the token ids of blocks are kept; engines are asked for them then. null, also when absent: nobody wants them. */
  readonly tokens?: TokenSink | null;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits?: Partial<SessionLimits>;
}

/** What the node's end of the session link is made with. */
import type { Namespace } from '@kvtier/identity';
import type { Store } from '@kvtier/placement';
import type { Clock, Log } from '@kvtier/runtime';
import type { SessionLimits } from './limits.ts';

export interface SessionServerOptions {
  readonly socketPath: string;
  readonly store: Store;
  readonly arenaPath: string;
  readonly arenaBytes: number;
  readonly arenaId: bigint;
  /** Larger blocks are refused at Attach. */
  readonly maxPayloadBytes: number;
  /** Bytes of a header, between a slot and its payload. */
  readonly headerBytes: number;
  /** Differs after every start. */
  readonly bootEpoch: bigint;
  /** Counts of the process, told with the store's. */
  readonly gauges?: () => Readonly<Record<string, number>>;
  /** SO_PEERCRED of a socket's file descriptor. */
  readonly peerCredentials: (fd: number) => { readonly pid: number; readonly uid: number };
  /** An engine has attached, and says how many tokens a block of its namespace has. */
  readonly onAttach?: (namespace: Namespace, blockTokens: number) => void;
  readonly clock: Clock;
  readonly log: Log;
  readonly limits?: Partial<SessionLimits>;
}

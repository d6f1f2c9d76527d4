/**
 * Discovery: who is said to be in the cluster. One interface, three ways (static, Redis, Kubernetes), one conformance suite
 * (testing/discovery-conformance.ts). It says who may be asked; whether a member lives is told by the connection to it, never by
 * discovery alone.
 */
import type { Membership } from '@kvtier/config';

export interface DiscoveryListener {
  /**
   * All members that are known now, names and addresses unique, sorted by name; called once when they are known first, then at each
   * change, never from inside `start` before it has returned.
   */
  changed(members: Membership): void;
  /** Why what is known may be old (one line), or undefined: all is well again. Members stay as they were meanwhile. */
  problem(why: string | undefined): void;
}

export interface Discovery {
  /** For logs: "static", "redis", "kubernetes". */
  readonly kind: string;
  /** Goes on by itself whatever fails after this. @throws KvError CONFIG: what can never work */
  start(listener: DiscoveryListener): Promise<void>;
  /** After this the listener is not called any more. */
  close(): Promise<void>;
}

/** What a node has to do with its peers: the loops that moves the bytes, the tier that fetches, the server that gives. */

import type { ArenaHandle } from '@kvtier/data-plane';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import type { ArenaTier, PeerAddress, PeerSecurity, Tier } from '@kvtier/tiers';
import { mostServed, PeerLoops, PeerServer, PeerTier } from '@kvtier/tiers/peer';

export interface PeersOptions {
  /** null: this node only fetches. */
  readonly listen: { readonly host: string; readonly port: number; readonly dataPort: number } | null;
  readonly peers: readonly PeerAddress[];
  readonly security: PeerSecurity;
  readonly streams: number;
  readonly readLimitMs: number;
  readonly maxBlocks: number;
}

type EndPin = (namespace: Namespace, ticket: Buffer) => void;
type Arriving = (namespace: Namespace, hash: HashKey) => Promise<void> | undefined;

export interface Peers {
  readonly tier: Tier;
  /** Beside those that the configuration names; `maxPeers` of all at most, which are returned. */
  setOthers(addresses: readonly PeerAddress[]): readonly PeerAddress[];
  /**
   * Give blocks of the arena and of the tier below to peers; returns the end of that. KvError when it cannot listen. `arriving`: of
   * a block that this node reads itself, fulfilled when that has ended. `endPin`: somebody has shown a ticket there.
   */
  serve(below: Tier | undefined, arriving: Arriving, endPin: EndPin): Promise<() => Promise<void>>;
  /** Whether blocks of the node with this boot epoch can come from there: it is a peer, or may be the one that is just not connected. */
  mayCome(epoch: bigint): boolean;
  /** Where peers reach it, once it serves; null: nowhere. */
  readonly listening: { readonly host: string; readonly port: number } | null;
  /** What they count beside the tier, by name. */
  gauges(): Readonly<Record<string, number>>;
  /** After the tier and the server have been closed. */
  close(): Promise<void>;
}

const threads = 2;
/** Of one peer that is served: as many as it has by default, or as we have, since nodes are mostly configured alike. */
const minStreams = 4;

/** `awaitsOthers`: which ones there are besides is said soon, by `setOthers`; until then they may be any. */
export function openPeers(
  options: PeersOptions,
  node: { readonly arena: ArenaHandle; readonly slots: ArenaTier; readonly epoch: bigint; readonly log: Log },
  awaitsOthers = false,
): Peers {
  const { listen, security, readLimitMs, streams } = options;
  const maxConnections = mostServed * Math.max(minStreams, streams);
  const tls = security.encryption === 'tls';
  const loops = new PeerLoops({ arena: node.arena, tls, threads, maxConnections, stallMs: readLimitMs });
  const tier = new PeerTier({ ...options, ...node, loops });
  let server: PeerServer | undefined;
  let isComplete = !awaitsOthers;
  return {
    tier,
    setOthers(addresses) {
      isComplete = true;
      return tier.setPeers([...options.peers, ...addresses]);
    },
    async serve(below, arriving, endPin) {
      if (listen === null) return async () => {};
      const opened = await PeerServer.open({ ...listen, ...node, loops, below, arriving, endPin, security });
      server = opened;
      return () => opened.close();
    },
    mayCome: (epoch) => !isComplete || tier.mayCome(epoch),
    get listening() {
      return listen && server ? { host: listen.host, port: server.port } : null;
    },
    gauges: () => {
      const { peers = 0, sentBlocks = 0, sentBytes = 0, declined = 0, corrupt = 0, unknown = 0 } = server?.counts ?? {};
      return {
        'peers.connected': peers,
        'peers.refused': server?.refusedCount ?? 0,
        'peers.sent.blocks': sentBlocks,
        'peers.sent.bytes': sentBytes,
        'peers.declined': declined,
        'peers.corrupt': corrupt,
        'peers.unknown_messages': (tier.stats().detail?.unknown_messages ?? 0) + unknown,
      };
    },
    close: () => loops.close(),
  };
}

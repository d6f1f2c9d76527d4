/**
 * The peer tier: what a node fetches from others (`PeerTier`), and gives to them (`PeerServer`), over one `PeerLoops`. Fetches of many
 * loads go together (`gathering.ts`); what a peer knows: `features.ts`; what it is given from below the arena: `reads-below.ts`.
 */
export type { PeerSecurity } from './control.ts';
export { maxPeers } from './directory.ts';
export { PeerLoops, type PeerLoopsOptions } from './peer-loops.ts';
export { mostServed, PeerServer, type PeerServerOptions } from './peer-server.ts';
export { PeerTier, type PeerTierOptions } from './peer-tier.ts';
export type { PeerAddress } from './remote-peer.ts';

/** For tests: doubles, rigs and what else of this tier they look at. */
export { Announcer, type Told } from '../announcer.ts';
export { bitOf, bitsOf, maxPeers, type PeerBits, PeerDirectory, PeerSet } from '../directory.ts';
export { Dropping } from '../dropping.ts';
export type { ChangeMessage, Message } from '../frames.ts';
export { fetchingTier, GivingNode, loopsOf, sharedSecret } from './peer-pair.ts';

/** For tests of other rooms. */
/** A pair of CURVE keys. */
export { curveKeyPair } from 'zeromq';
export { Continuity, type Replay, type Snapshot } from '../continuity.ts';
export { Probing } from '../probing.ts';
export { type Published, ReplayBuffer } from '../replay-buffer.ts';
export { foreignBatch } from './foreign.ts';
export { NaiveHolders } from './naive-holders.ts';

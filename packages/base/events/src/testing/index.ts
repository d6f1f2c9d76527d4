/** For tests of other rooms. */
export { Continuity, type Replay, type Snapshot } from '../continuity.ts';
export { Probing } from '../probing.ts';
export { type Published, ReplayBuffer } from '../replay-buffer.ts';
export { NaiveHolders } from './naive-holders.ts';

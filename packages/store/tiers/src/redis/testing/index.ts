/** For tests: doubles, rigs and what else of this tier they look at. */

export { Directory } from '../directory.ts';
export { NativePool, type ValueEnd, type ValueJob } from '../native-pool.ts';
export type { MoveResult, PieceJob } from '../piece-connection.ts';
export { PiecePool } from '../piece-pool.ts';
export { RedisIndex } from '../redis-index.ts';
export { parseEntry } from '../replies.ts';
export { chargeOf, maxEvents } from '../script-pieces.ts';
export * as scripts from '../scripts.ts';
export { openTier } from './redis.ts';

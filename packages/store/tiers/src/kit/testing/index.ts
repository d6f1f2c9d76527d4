/** For tests: doubles, rigs and what else of this room they look at. */
export { lz4Calls } from '../../codec/codec.ts';
export { decodeTable, maxTableBytes } from '../../codec/encoded.ts';
export { PoolTurns } from '../../codec/pool-turns.ts';
export type { Pages } from '../followers.ts';
export { tierConformance } from './conformance.ts';
export { seededRandom } from './faulty-tier.ts';
export { hashNamed, namespaceNamed, payloadOf, TestBench } from './objects.ts';
export { watchTurns } from './turns.ts';

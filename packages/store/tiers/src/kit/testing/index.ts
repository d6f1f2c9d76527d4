/** For tests: doubles, rigs and what else of this room they look at. */
export { SizeClass } from '../../arena/size-class.ts';
export { lz4Calls } from '../../codec/codec.ts';
export { decodeTable, maxTableBytes } from '../../codec/encoded.ts';
export { PoolTurns } from '../../codec/pool-turns.ts';
export type { Pages } from '../followers.ts';
export { tierConformance } from './conformance.ts';
export { seededRandom } from './faulty-tier.ts';
export { byLaw, LawBroken } from './law.ts';
export { hashNamed, namespaceNamed, payloadOf, TestBench } from './objects.ts';
export { watchTurns } from './turns.ts';

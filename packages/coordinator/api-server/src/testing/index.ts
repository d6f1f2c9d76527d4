/** For tests: doubles, rigs and what else of this room they look at. */

export { Expected } from '../expected.ts';
export { Tries } from '../tries.ts';
export { type WorstTurns, watchTurns } from './turns.ts';

/** For tests: doubles, rigs and what else of this room they look at. */
export { packed, RawClient } from './raw-client.ts';

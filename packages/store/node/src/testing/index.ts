/** For tests: doubles, rigs and what else of this room they look at. */
export { openOrLater } from '../late-tier.ts';
export { PeerChoice } from '../peer-choice.ts';

/** Clocks and log, as arguments of all that needs them. */
export { type Clock, createSystemClock, systemClock } from './clock.ts';
export { type FirstOf, firstOf } from './first-of.ts';
export type { Log } from './log.ts';
export { SliceTimer } from './slice-timer.ts';
export { runningTimeout, Watch } from './watch.ts';

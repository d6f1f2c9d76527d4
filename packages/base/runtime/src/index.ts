/** Clocks and log, as arguments of all that needs them. */
export { type Clock, createSystemClock, systemClock } from './clock.ts';
export type { Log } from './log.ts';
export { runningTimeout, Watch } from './watch.ts';

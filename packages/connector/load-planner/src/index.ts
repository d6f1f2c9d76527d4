/** Load or compute: what a request should take from the tier. */
export { type Hit, type LoadChoice, LoadPlanner, type Plan } from './planner.ts';

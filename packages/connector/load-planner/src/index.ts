/** Load or compute: what a request should take from the tier. */
export type { Hit, LoadChoice, Plan } from './plan.ts';
export { LoadPlanner } from './planner.ts';

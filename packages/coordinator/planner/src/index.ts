/** How many workers the load needs, and what those of both roles are for just now. */
export { plannerMetrics } from './metrics.ts';
export type { LoadFigures, Plan, RolePlan, Targets, WorkerRates } from './plan.ts';
export { type ModelPlan, type PlannedWorkers, Planner, type PlannerOptions } from './planner.ts';
export { type ExternalScaler, type ScalerOptions, startScaler } from './scaler.ts';

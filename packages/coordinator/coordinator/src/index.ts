/** A coordinator, put together. */
export { coordinatorChecks } from './checks.ts';
export { type Coordinator, startCoordinator } from './coordinator.ts';

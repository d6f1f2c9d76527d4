/** A coordinator, put together. */
export { type Coordinator, startCoordinator } from './coordinator.ts';

/** The engine worker, put together: scheduler, executor, gRPC service, metrics. */
export { engineWorkerChecks } from './checks.ts';
export { startWorker } from './worker.ts';

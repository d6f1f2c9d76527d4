/** The engine worker, put together: scheduler, executor, gRPC service, metrics. */
export { startWorker } from './worker.ts';

/** The engine worker: one model, served over gRPC, with or without a cache node beside it. */
import { engineWorkerSchema, readServiceConfig } from '@kvtier/config';
import { createLogger, runService } from '@kvtier/telemetry';
import { startWorker } from './worker.ts';

runService('engine-worker', async () => {
  const config = readServiceConfig(engineWorkerSchema);
  return await startWorker(config, createLogger('engine-worker', config.logLevel));
});

/** The engine worker: one model, served over gRPC, with or without a cache node beside it. */
import { engineWorkerSchema, readServiceConfig } from '@kvtier/config';
import { createConnector } from '@kvtier/session-client';
import { createLogger, runService } from '@kvtier/telemetry';
import { startWorker } from '@kvtier/worker';

runService('engine-worker', async () => {
  const config = readServiceConfig(engineWorkerSchema);
  return await startWorker(config, createLogger('engine-worker', config.logLevel), createConnector);
});

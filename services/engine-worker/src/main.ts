/** The engine worker: one model, served over gRPC, with or without a cache node beside it (docs/engine-worker.md). */
import { checkSocketFolder, engineWorkerSchema, readServiceConfig } from '@kvtier/config';
import { createConnector } from '@kvtier/session-client';
import { runService, serviceLogger } from '@kvtier/telemetry';
import { startWorker } from '@kvtier/worker';

runService('engine-worker', async ({ configFile }) => {
  const config = readServiceConfig(engineWorkerSchema, configFile);
  const logger = serviceLogger('engine-worker', config.logLevel);
  checkSocketFolder('listen', config.listen);
  return await startWorker(config, logger, createConnector);
});

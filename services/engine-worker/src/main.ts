/** The engine worker: one model, served over gRPC, with or without a cache node beside it (docs/engine-worker.md). */
import { checkSocketFolder, engineWorkerSchema, readServiceConfig } from '@kvtier/config';
import { createConnector } from '@kvtier/session-client';
import { runService, type ServiceArguments, serviceLogger } from '@kvtier/telemetry';
import { engineWorkerChecks, startWorker } from '@kvtier/worker';

const read = ({ configFile }: ServiceArguments) => readServiceConfig(engineWorkerSchema, configFile);

runService(
  'engine-worker',
  async (given) => {
    const config = read(given);
    const logger = serviceLogger('engine-worker', config.logLevel);
    checkSocketFolder('listen', config.listen);
    return await startWorker(config, logger, createConnector);
  },
  (given) => engineWorkerChecks(read(given)),
);

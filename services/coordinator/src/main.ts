/**
 * The coordinator process: the OpenAI-compatible API server in front of engine workers. Logic is in @kvtier/coordinator.
 * Configuration: `--config FILE` or KVTIER_CONFIG (docs/coordinator.md). Ready message: {url}.
 */

import { coordinatorServiceSchema, readServiceConfig } from '@kvtier/config';
import { coordinatorChecks, startCoordinator } from '@kvtier/coordinator';
import { runService, type ServiceArguments, serviceLogger } from '@kvtier/telemetry';

const read = ({ configFile }: ServiceArguments) => readServiceConfig(coordinatorServiceSchema, configFile);

runService(
  'coordinator',
  async (given) => {
    const config = read(given);
    const logger = serviceLogger('coordinator', config.logLevel);
    const { url, served, close } = await startCoordinator(config, logger);
    return { ready: { url }, begun: served, close };
  },
  (given, warn) => coordinatorChecks(read(given), warn),
);

/**
 * The coordinator process: the OpenAI-compatible API server in front of engine workers. Logic is in @kvtier/coordinator.
 * Configuration: `--config FILE` or KVTIER_CONFIG (docs/coordinator.md). Ready message: {url}.
 */

import { coordinatorServiceSchema, readServiceConfig } from '@kvtier/config';
import { startCoordinator } from '@kvtier/coordinator';
import { runService, serviceLogger } from '@kvtier/telemetry';

runService('coordinator', async ({ configFile }) => {
  const config = readServiceConfig(coordinatorServiceSchema, configFile);
  const logger = serviceLogger('coordinator', config.logLevel);
  const { url, served, close } = await startCoordinator(config, logger);
  return { ready: { url }, begun: served, close };
});

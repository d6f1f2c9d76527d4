/**
 * The coordinator process: the OpenAI-compatible API server in front of engine workers. Logic is in @kvtier/coordinator.
 * Configuration: `--config FILE` or KVTIER_CONFIG, see coordinatorSchema. Ready message: {url}.
 */

import { coordinatorSchema, readServiceConfig } from '@kvtier/config';
import { startCoordinator } from '@kvtier/coordinator';
import { createLogger, runService } from '@kvtier/telemetry';

runService('coordinator', async () => {
  const config = readServiceConfig(coordinatorSchema);
  const logger = createLogger('coordinator', config.logLevel);
  const { url, close } = await startCoordinator(config, logger);
  return { ready: { url }, close };
});

/**
 * The coordinator process: the OpenAI-compatible API server in front of one engine worker. Logic is in @kvtier/api-server.
 * Configuration: `--config FILE` or KVTIER_CONFIG, see coordinatorSchema. Ready message: {url}.
 */

import { startApiServer } from '@kvtier/api-server';
import { coordinatorSchema, readServiceConfig } from '@kvtier/config';
import { createLogger, runService } from '@kvtier/telemetry';

runService('coordinator', async () => {
  const config = readServiceConfig(coordinatorSchema);
  const logger = createLogger('coordinator', config.logLevel);
  const server = await startApiServer({ host: config.host, port: config.port, engine: config.engine, logger });
  logger.info({ url: server.url }, 'API server open');
  return { ready: { url: server.url }, close: () => server.close() };
});

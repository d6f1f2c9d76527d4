/**
 * The coordinator process: the OpenAI-compatible door in front of one engine worker. Logic is in @kvtier/door.
 * Configuration: `--config FILE` or KVTIER_CONFIG, see coordinatorSchema. Ready message: {url}.
 */
import { coordinatorSchema, readServiceConfig } from '@kvtier/config';
import { startDoor } from '@kvtier/door';
import { createLogger, runService } from '@kvtier/telemetry';

runService('coordinator', async () => {
  const config = readServiceConfig(coordinatorSchema);
  const logger = createLogger('coordinator', config.logLevel);
  const door = await startDoor({ host: config.host, port: config.port, engine: config.engine, logger });
  logger.info({ url: door.url }, 'door open');
  return { ready: { url: door.url }, close: () => door.close() };
});

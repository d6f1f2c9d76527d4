/** The publisher of the engine's KV events, from its configuration. */
import { type KvEventsConfig, readKvEventsCurve } from '@kvtier/config';
import { KvEventPublisher } from '@kvtier/events';
import { type Logger, tellRenewed } from '@kvtier/telemetry';

/** Throws KvError CONFIG, LOCKED, IO: see KvEventPublisher.start. */
export async function startKvEvents(config: KvEventsConfig, logger: Logger): Promise<KvEventPublisher> {
  const curve = readKvEventsCurve(config, tellRenewed(logger, 'KV events: keys'));
  const publisher = await KvEventPublisher.start({ ...config, curve, logger });
  const { endpoint, replayEndpoint } = publisher;
  logger.info({ endpoint, replayEndpoint, topic: config.topic }, 'publishes KV events');
  return publisher;
}

/** The publisher of the engine's KV events, from its configuration. */
import { type KvEventsConfig, readKvEventsCurve } from '@kvtier/config';
import { KvEventPublisher } from '@kvtier/events';
import type { Logger } from '@kvtier/telemetry';

/** Throws KvError CONFIG, LOCKED, IO: see KvEventPublisher.start. */
export async function startKvEvents(config: KvEventsConfig, logger: Logger): Promise<KvEventPublisher> {
  const publisher = await KvEventPublisher.start({ ...config, curve: readKvEventsCurve(config), logger });
  const { endpoint, replayEndpoint } = publisher;
  logger.info({ endpoint, replayEndpoint, topic: config.topic }, 'publishes KV events');
  return publisher;
}

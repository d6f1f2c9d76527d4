/** The publisher of the engine's KV events, from its configuration: the secret key is read from its file here. */
import { readFileSync } from 'node:fs';
import type { KvEventsConfig } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { KvEventPublisher } from '@kvtier/events';
import type { Logger } from '@kvtier/telemetry';

/** Throws KvError CONFIG, LOCKED, IO: see KvEventPublisher.start. */
export async function startKvEvents(config: KvEventsConfig, logger: Logger): Promise<KvEventPublisher> {
  const { curve, ...options } = config;
  const publisher = await KvEventPublisher.start({
    ...options,
    curve: curve && { secretKey: readKey(curve.secretKeyFile), allowedClientKeys: curve.allowedClientKeys },
    logger,
  });
  const { endpoint, replayEndpoint } = publisher;
  logger.info({ endpoint, replayEndpoint, topic: config.topic }, 'publishes KV events');
  return publisher;
}

function readKey(file: string): string {
  try {
    return readFileSync(file, 'utf8').trim();
  } catch (error) {
    const why = (error as Error).message;
    throw new KvError('CONFIG', `kvEvents.curve.secretKeyFile ${file}: cannot be read (${why}); name a readable file`);
  }
}

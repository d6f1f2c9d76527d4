/**
 * How a publisher is read. On a Unix socket or on loopback as it stands; on another host only when its key and ours are configured
 * (CURVE), or when the network is said to be trusted: who can forge KV events decides where prompts go.
 */
import type { EventAccess, EventSource } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { isLocalEndpoint, KvEventSubscriber } from '@kvtier/events';
import type { Subscribe } from './followed-stream.ts';

/** A larger message ends the connection. */
const maxMessageBytes = 4 * 2 ** 20;

/** Calls throw KvError CONFIG: it may not be read so. */
export function subscribeWith(access: EventAccess): Subscribe {
  return (events) => {
    const { endpoint, replayEndpoint, topic } = events;
    return new KvEventSubscriber({ endpoint, replayEndpoint, topic, maxMessageBytes, curve: curveOf(events, access) });
  };
}

function curveOf({ endpoint, replayEndpoint, serverKey: its }: EventSource, { curve, trustedNetwork }: EventAccess) {
  const beyond = [endpoint, replayEndpoint].find((each) => each?.includes('://') && !isLocalEndpoint(each));
  const serverKey = its ?? (beyond === undefined ? undefined : curve?.serverKey);
  if (curve !== undefined && serverKey) return { ...curve, serverKey };
  if (its !== undefined) {
    const missing = 'its publisher has a CURVE key, and we have none';
    throw new KvError('CONFIG', `KV events at ${endpoint}: ${missing}; configure kvEvents.curve of the coordinator`);
  }
  if (beyond === undefined || trustedNetwork) return null;
  const missing = `is on another host and no key of its publisher is known`;
  const remedy = 'configure kvEvents.curve of the coordinator, or say "kvEvents": {"trustedNetwork": true}';
  throw new KvError('CONFIG', `KV events: ${beyond} ${missing}; ${remedy}`);
}

/**
 * How a publisher is read. On a Unix socket or on loopback as it stands; on another host only when its key and ours are configured
 * (CURVE), or when the network is said to be trusted: who can forge KV events decides where prompts go.
 *
 * vLLM and SGLang publish in the clear. So the key for all publishers whose record names none is that of ours; on a trusted network it is
 * asked of no pod's own publisher, which would never answer.
 */
import type { EventAccess, EventSource } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { isLocalEndpoint, KvEventSubscriber } from '@kvtier/events';
import type { Subscribe } from './followed-stream.ts';
import { KeyedSubscription } from './keyed-subscription.ts';

/** A larger message ends the connection. */
const maxMessageBytes = 4 * 2 ** 20;

/** Calls throw KvError CONFIG: it may not be read so. Each takes the keys of its moment, and of two of publishers one after the other. */
export function subscribeWith(access: EventAccess): Subscribe {
  const turns = new WeakMap<EventSource, number>();
  return (events, isPod = false) => {
    const { endpoint, replayEndpoint, topic } = events;
    const at = { endpoint, replayEndpoint, topic, maxMessageBytes };
    const serverKeys = serverKeysOf(events, access, isPod);
    const { curve } = access;
    if (serverKeys === null || curve === undefined) return new KvEventSubscriber({ ...at, curve: null });
    const turn = turns.get(events) ?? 0;
    turns.set(events, turn + 1);
    return new KeyedSubscription({ at, curve, serverKeys, turn });
  };
}

/** What its publisher's key may be, now and later; null: it is read without. */
function serverKeysOf(
  events: EventSource,
  { curve, trustedNetwork }: EventAccess,
  isPod: boolean,
): (() => readonly string[]) | null {
  const { endpoint, replayEndpoint, serverKey: its } = events;
  const beyond = [endpoint, replayEndpoint].find((each) => each?.includes('://') && !isLocalEndpoint(each));
  if (curve !== undefined && its !== undefined) return () => [its];
  const isInTheClear = isPod && its === undefined && trustedNetwork;
  if (curve !== undefined && beyond !== undefined && curve.serverKeys.length > 0 && !isInTheClear)
    return () => curve.serverKeys;
  if (its !== undefined) {
    const missing = 'its publisher has a CURVE key, and we have none';
    throw new KvError('CONFIG', `KV events at ${endpoint}: ${missing}; configure kvEvents.curve of the coordinator`);
  }
  if (beyond === undefined || trustedNetwork) return null;
  const missing = `is on another host and no key of its publisher is known`;
  const remedy = 'configure kvEvents.curve of the coordinator, or say "kvEvents": {"trustedNetwork": true}';
  throw new KvError('CONFIG', `KV events: ${beyond} ${missing}; ${remedy}`);
}

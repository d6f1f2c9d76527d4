/** Where a member publishes its KV events, as its record tells readers: with its CURVE key, which may be another one later. */
import type { EventSource } from '@kvtier/config';

export interface PublishedEvents {
  readonly endpoint: string;
  readonly replayEndpoint: string | null;
  readonly topic: string;
  /** Of now; null: it has none. */
  readonly serverKey: string | null;
  /** Told when it is another one. */
  onServerKey(listener: () => void): void;
}

/** As configured; else where it publishes. A key that is configured stands, else it is the publisher's of now. */
export function announcedEvents(
  configured: EventSource | null | undefined,
  published: PublishedEvents | null,
): EventSource | null {
  if (configured === null || (configured === undefined && published === null)) return null;
  const { endpoint, replayEndpoint, topic } = configured ?? published!;
  const serverKey = configured?.serverKey ?? published?.serverKey ?? undefined;
  return { endpoint, replayEndpoint, topic, ...(serverKey !== undefined && { serverKey }) };
}

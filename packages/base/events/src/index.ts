/** KV events in vLLM's encoding: codec, publisher and subscriber over ZeroMQ. */
export { decodeBatch, type Encoding, encodeBatch } from './codec.ts';
export type { StreamItem } from './continuity.ts';
export {
  type AllBlocksCleared,
  type BlockHash,
  type BlockRemoved,
  type BlockStored,
  integerOf,
  type KvEvent,
  type KvEventBatch,
  media,
} from './event.ts';
export { type PackedBatch, PackedDecoder, record, recordType } from './packed-decoder.ts';
export { PackedEncoder, type PackedEvents } from './packed-encoder.ts';
export {
  KvEventPublisher,
  type KvEventPublisherOptions,
  type KvEventPublisherStats,
  type SnapshotPage,
} from './publisher.ts';
export { bindableEndpoint, type CurveClient, type CurveServer, isLocalEndpoint } from './security.ts';
export { KvEventSubscriber, type KvEventSubscriberOptions, type KvEventSubscriberStats } from './subscriber.ts';
export { type BlockTokens, subtopicOf, type TierChange, type TierEventsOptions, tierEvents } from './tier-events.ts';

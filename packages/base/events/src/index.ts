/**
 * KV events in vLLM's encoding: codec, publisher and subscriber over ZeroMQ. What is on its way to a socket: `outbox.ts`; another key:
 * `bound-sockets.ts`; a connection that brings nothing: `deafness.ts`; what may be long in coming: `arrival.ts`.
 */
export { decodeBatch, type Encoding, encodeBatch } from './codec.ts';
export type { StreamItem } from './continuity.ts';
export type { AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KvEvent, KvEventBatch } from './event.ts';
export { type PackedBatch, PackedDecoder, record, recordType } from './packed-decoder.ts';
export { PackedEncoder, type PackedEvents } from './packed-encoder.ts';
export {
  KvEventPublisher,
  type KvEventPublisherOptions,
  type KvEventPublisherStats,
  type SnapshotPage,
} from './publisher.ts';
export { type CurveClient, type CurveServer, isLocalEndpoint } from './security.ts';
export { KvEventSubscriber, type KvEventSubscriberOptions, type KvEventSubscriberStats } from './subscriber.ts';
export { type BlockTokens, type TierChange, type TierEventsOptions, tierEvents } from './tier-events.ts';

/**
 * What a tier says about its contents (`Tier.follow`) as KV events: the medium names the tier, only hashes are known, as in
 * the events of vLLM's offloading connector. Events of one namespace travel under one topic: hashes do not name the model,
 * and without that, blocks of two models would be mixed up.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { type KvEvent, media } from './event.ts';

/** `TierChange` of `@kvtier/tiers`, which this package stands below. */
export type TierChange =
  | { readonly kind: 'stored' | 'removed'; readonly namespace: Namespace; readonly hashes: readonly HashKey[] }
  | { readonly kind: 'cleared'; readonly namespace: null; readonly hashes: readonly HashKey[] };

export interface TierEventsOptions {
  /** As the tier is called: arena, disk, redis, s3, peer. */
  readonly tier: string;
  /** Tokens per block of a namespace; 0 (also when absent): not known. */
  readonly blockTokens?: (namespace: Namespace) => number;
  readonly publish: (events: readonly KvEvent[], subtopic: string) => void;
}

const placeOf: Readonly<Record<string, { readonly medium: string; readonly locality: string }>> = {
  arena: { medium: media.cpu, locality: 'LOCAL' },
  disk: { medium: media.disk, locality: 'LOCAL' },
  redis: { medium: media.redis, locality: 'REMOTE' },
  s3: { medium: media.s3, locality: 'REMOTE' },
  peer: { medium: media.peer, locality: 'REMOTE' },
};

/** A tier of a million blocks is announced in events of this many. */
const maxHashesPerEvent = 4_096;
/** Namespaces that were announced and so must hear of a clear. Further ones are published, too, but not remembered. */
const maxNamespaces = 1_024;

/** The listener for one tier: `tier.follow(tierEvents({ tier: tier.name, publish: (events, subtopic) => ... }))`. */
export function tierEvents({ tier, blockTokens = () => 0, publish }: TierEventsOptions): (change: TierChange) => void {
  const { medium, locality } = placeOf[tier] ?? { medium: tier.toUpperCase(), locality: 'LOCAL' };
  const subtopics = new Set<string>();
  return ({ kind, namespace, hashes }) => {
    if (kind === 'cleared') {
      for (const subtopic of subtopics) publish([{ type: 'AllBlocksCleared', medium }], subtopic);
      return;
    }
    const subtopic = subtopicOf(namespace);
    if (subtopics.size < maxNamespaces) subtopics.add(subtopic);
    for (let i = 0; i < hashes.length; i += maxHashesPerEvent) {
      const blockHashes = hashes.slice(i, i + maxHashesPerEvent);
      const stored = {
        parentBlockHash: null,
        tokenIds: [],
        blockSize: blockTokens(namespace),
        loraId: null,
        loraName: null,
      };
      const event: KvEvent =
        kind === 'stored'
          ? { type: 'BlockStored', blockHashes, ...stored, medium, locality }
          : { type: 'BlockRemoved', blockHashes, medium, locality };
      publish([event], subtopic);
    }
  };
}

/** Appended to the publisher's topic: "@" and the first 16 hex digits of the namespace. */
export function subtopicOf(namespace: Namespace): string {
  return `@${Buffer.from(namespace.digest.buffer, namespace.digest.byteOffset, 8).toString('hex')}`;
}

/**
 * What a tier says about its contents (`Tier.follow`) as KV events: the medium names the tier. Only hashes are known, as in the events
 * of vLLM's offloading connector; where tokens are, too, events are self-describing, as vLLM's with `self_describing_kv_events`: blocks
 * that follow each other in one event, with their tokens, their size and the hash before the first. Events of one namespace travel
 * under one topic: hashes do not name the model, and without that, blocks of two models would be mixed up.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { type BlockStored, type KvEvent, media } from './event.ts';

/** `TierChange` of `@kvtier/tiers`, which this package stands below. */
export type TierChange =
  | { readonly kind: 'stored' | 'removed'; readonly namespace: Namespace; readonly hashes: readonly HashKey[] }
  | { readonly kind: 'cleared'; readonly namespace: null; readonly hashes: readonly HashKey[] };

export interface TierEventsOptions {
  /** As the tier is called: arena, disk, redis, s3, peer. */
  readonly tier: string;
  /** Tokens per block of a namespace; 0 (also when absent): not known. */
  readonly blockTokens?: (namespace: Namespace) => number;
  /** Tokens of a block and the hash before it, null at the root; undefined (also when absent): not known. */
  readonly tokens?: (namespace: Namespace, hash: HashKey) => BlockTokens | undefined;
  readonly publish: (events: readonly KvEvent[], subtopic: string) => void;
}

const placeOf: Readonly<Record<string, { readonly medium: string; readonly locality: string }>> = {
  arena: { medium: media.cpu, locality: 'LOCAL' },
  disk: { medium: media.disk, locality: 'LOCAL' },
  redis: { medium: media.redis, locality: 'REMOTE' },
  s3: { medium: media.s3, locality: 'REMOTE' },
  peer: { medium: media.peer, locality: 'REMOTE' },
};

export interface BlockTokens {
  readonly parent: HashKey | null;
  readonly tokenIds: ArrayLike<number>;
}

/** A tier of a million blocks is announced in events of this many. */
const maxHashesPerEvent = 4_096;
/** In the events of one batch. */
const maxTokensPerBatch = 16_384;
/** Namespaces that were announced and so must hear of a clear. Further ones are published, too, but not remembered. */
const maxNamespaces = 1_024;

/** The listener for one tier: `tier.follow(tierEvents({ tier: tier.name, publish: (events, subtopic) => ... }))`. */
export function tierEvents(options: TierEventsOptions): (change: TierChange) => void {
  const { tier, blockTokens = () => 0, tokens = () => undefined, publish } = options;
  const { medium, locality } = placeOf[tier] ?? { medium: tier.toUpperCase(), locality: 'LOCAL' };
  const subtopics = new Set<string>();
  return ({ kind, namespace, hashes }) => {
    if (kind === 'cleared') {
      for (const subtopic of subtopics) publish([{ type: 'AllBlocksCleared', medium }], subtopic);
      return;
    }
    const subtopic = subtopicOf(namespace);
    if (subtopics.size < maxNamespaces) subtopics.add(subtopic);
    if (kind === 'removed') {
      for (let i = 0; i < hashes.length; i += maxHashesPerEvent) {
        const blockHashes = hashes.slice(i, i + maxHashesPerEvent);
        publish([{ type: 'BlockRemoved', blockHashes, medium, locality }], subtopic);
      }
      return;
    }
    const blockSize = blockTokens(namespace);
    let events: KvEvent[] = [];
    let weight = 0;
    const flush = (): void => {
      if (events.length > 0) publish(events, subtopic);
      events = [];
      weight = 0;
    };
    for (const { parent, blockHashes, tokenIds } of runsOf(hashes, blockSize, (hash) => tokens(namespace, hash))) {
      const described = { parentBlockHash: parent, tokenIds, blockSize, loraId: null, loraName: null };
      const event: BlockStored = { type: 'BlockStored', blockHashes, ...described, medium, locality };
      const added = Math.max(tokenIds.length, blockHashes.length);
      if (weight + added > maxTokensPerBatch || blockHashes.length === maxHashesPerEvent) flush();
      events.push(event);
      weight += added;
    }
    flush();
  };
}

interface Run {
  readonly parent: HashKey | null;
  readonly blockHashes: HashKey[];
  readonly tokenIds: number[];
}

/** In the order of `hashes`: blocks that follow each other, with their tokens; or blocks of which none are known. */
function* runsOf(
  hashes: readonly HashKey[],
  blockSize: number,
  tokensOf: (hash: HashKey) => BlockTokens | undefined,
): Generator<Run> {
  let run: Run | undefined;
  for (const hash of hashes) {
    const told = tokensOf(hash);
    const known = told?.tokenIds.length === blockSize ? told : undefined;
    const last = run?.blockHashes.at(-1);
    const isSame =
      run !== undefined &&
      (known === undefined ? run.tokenIds.length === 0 : run.tokenIds.length > 0 && known.parent === last);
    const isFull =
      run !== undefined &&
      (run.blockHashes.length >= maxHashesPerEvent || run.tokenIds.length + blockSize > maxTokensPerBatch);
    if (run === undefined || !isSame || isFull) {
      if (run !== undefined) yield run;
      run = { parent: known?.parent ?? null, blockHashes: [], tokenIds: [] };
    }
    run.blockHashes.push(hash);
    if (known !== undefined) for (let at = 0; at < blockSize; at++) run.tokenIds.push(known.tokenIds[at]!);
  }
  if (run !== undefined) yield run;
}

/** Appended to the publisher's topic: "@" and the first 16 hex digits of the namespace. */
export function subtopicOf(namespace: Namespace): string {
  return `@${Buffer.from(namespace.digest.buffer, namespace.digest.byteOffset, 8).toString('hex')}`;
}

/**
 * What one cache node says of its tiers, applied to the index: a source for each namespace (a model's attention group), as blocks of two
 * models may have one hash. What it says of shared tiers goes to `SharedBlocks`; what it says of its peers' blocks is left to them. Pure, as EngineListing.
 */
import { type PackedBatch, recordType, type StreamItem } from '@kvtier/events';
import type { KvIndex } from '../kv-index.ts';
import type { Lies } from './lies.ts';
import { mediumNumbers, mediumOf, sharedMedia } from './media.ts';
import { eventsIn, type PackedEvent } from './packed-events.ts';
import { Part } from './part.ts';
import type { SharedBlocks, Teller } from './shared-blocks.ts';
import { Slicer, slices } from './slices.ts';
import { tellUnread } from './unread.ts';

export interface NodeListingOptions {
  readonly index: KvIndex;
  readonly blockTokens: number;
  readonly maxBlocks: number;
  readonly shared: SharedBlocks;
  readonly teller: Teller;
  readonly lies: Lies;
}

/** Namespaces of one node. */
const maxParts = 64;

export class NodeListing {
  readonly #options: NodeListingOptions;
  readonly #slicer: Slicer;
  /** First 16 hex digits of the namespace → its part. */
  readonly #parts = new Map<string, Part>();

  constructor(options: NodeListingOptions) {
    this.#options = options;
    this.#slicer = new Slicer(options.index);
  }

  /** Namespaces that it has told of. */
  get namespaces(): readonly string[] {
    return [...this.#parts.keys()];
  }

  partOf(namespace: string): Part | undefined {
    return this.#parts.get(namespace);
  }

  /** As EngineListing's. */
  *apply(item: StreamItem<PackedBatch>): Generator<void, boolean> {
    tellUnread(item, this.#options.lies);
    if (item.kind === 'restarted') return this.forget();
    if (item.kind !== 'batch') {
      this.#options.shared.voided(this.#options.teller);
      return this.#close();
    }
    const namespace = namespaceIn(item.topic);
    const before = this.#parts.size;
    yield* this.#slicer.inTurns(this.#events(namespace, item.batch));
    return this.#parts.size !== before;
  }

  forget(): boolean {
    this.#options.shared.left(this.#options.teller);
    return this.#close();
  }

  #close(): boolean {
    const had = this.#parts.size > 0;
    for (const part of this.#parts.values()) part.close();
    this.#parts.clear();
    return had;
  }

  *#events(namespace: string, batch: PackedBatch): Generator<number, void> {
    for (const event of eventsIn(batch)) yield* this.#event(namespace, event);
  }

  *#event(namespace: string, event: PackedEvent): Generator<number, void> {
    const { blockTokens, lies, shared, teller } = this.#options;
    const medium = event.medium === undefined ? undefined : mediumOf(event.medium);
    if (medium === undefined || medium === mediumNumbers.gpu) {
      lies.tell('medium', () => `blocks on ${event.medium ?? 'no medium'}, which no cache node has`);
      return;
    }
    if (medium === mediumNumbers.peer) return;
    if (event.type === recordType.stored && event.blockTokens !== 0 && event.blockTokens !== blockTokens) {
      lies.tell('block_size', () => `blocks of ${event.blockTokens} tokens, the index has blocks of ${blockTokens}`);
      return;
    }
    if (sharedMedia.includes(medium)) {
      yield* shared.event(teller, namespace, medium, event);
      return;
    }
    let part = this.#parts.get(namespace);
    if (event.type === recordType.cleared) {
      part?.cleared(medium);
      yield 1;
      return;
    }
    if (part === undefined) {
      if (event.type === recordType.removed) return;
      part = this.#partOf(namespace);
      if (part === undefined) return;
    }
    let parent = event.parent;
    for (const keys of slices(event.keys)) {
      if (event.type === recordType.removed) part.removed(medium, keys);
      else if (!part.stored(medium, keys, parent ?? 'unknown')) {
        lies.tell('too_many_blocks', () => `more than ${this.#options.maxBlocks} blocks`);
        return;
      }
      if (parent !== undefined) parent = keys.subarray(keys.length - 2);
      yield keys.length / 2;
    }
  }

  #partOf(namespace: string): Part | undefined {
    const { index, maxBlocks, lies } = this.#options;
    if (this.#parts.size >= maxParts) {
      lies.tell('too_many_parts', () => `blocks of more than ${maxParts} namespaces`);
      return undefined;
    }
    const part = new Part(index, maxBlocks);
    this.#parts.set(namespace, part);
    return part;
  }
}

/** What `subtopicOf` appends to a topic; empty: nothing. */
const namespaceIn = (topic: string): string => /@([0-9a-f]{16})$/.exec(topic)?.[1] ?? '';

/**
 * What one cache node says of its tiers, applied to the index: a source for each namespace (a model's attention group), as blocks of two
 * models may have one hash. What it says of shared tiers goes to `SharedBlocks`; what it says of its peers' blocks is left to them. Beside an
 * engine that names blocks otherwise than we do, it does so, too: those are named anew (node-names.ts). Pure, as EngineListing.
 */
import { type PackedBatch, recordType, type StreamItem } from '@kvtier/events';
import type { Keys, KvIndex, Parent } from '../kv-index.ts';
import type { Problem } from './followed-stream.ts';
import type { ForeignNames } from './foreign-names.ts';
import type { Lies } from './lies.ts';
import { mediumNumbers, mediumOf, sharedMedia } from './media.ts';
import { NodeNames } from './node-names.ts';
import { eventsIn, type PackedEvent } from './packed-events.ts';
import { Part } from './part.ts';
import type { SharedBlocks, Teller } from './shared-blocks.ts';
import { Slicer, slices } from './slices.ts';
import { tellUnread } from './unread.ts';
import type { Place } from './waiting-runs.ts';

export interface NodeListingOptions {
  readonly index: KvIndex;
  readonly blockTokens: number;
  readonly maxBlocks: number;
  readonly shared: SharedBlocks;
  readonly teller: Teller;
  readonly lies: Lies;
  /** Set beside engines that hash otherwise: what names of blocks all such nodes share. */
  readonly names?: ForeignNames | undefined;
  /** Its namespaces are others, by what another node told. */
  readonly onChange?: () => void;
  /** So many blocks were told of, and are not in the index for want of room. */
  readonly onLeftOut?: (blocks: number) => void;
  /** So many were, and nobody knows their tokens. */
  readonly onUnnamed?: (blocks: number) => void;
}

/** Namespaces of one node. */
const maxParts = 64;
const localMedia = [mediumNumbers.cpu, mediumNumbers.disk];

export class NodeListing {
  readonly #options: NodeListingOptions;
  readonly #slicer: Slicer;
  /** First 16 hex digits of the namespace → its part. */
  readonly #parts = new Map<string, Part>();
  readonly #names: NodeNames | undefined;
  /** Of renamed ones: those that an engine beside it needs. */
  #needed: readonly string[] = [];
  /** Parts that there were when it said last that something is other. */
  #partsTold = 0;

  constructor(options: NodeListingOptions) {
    this.#options = options;
    this.#slicer = new Slicer(options.index);
    const { names, blockTokens, lies, onLeftOut = () => {}, onUnnamed = () => {} } = options;
    if (names === undefined) return;
    this.#names = new NodeNames({
      ...{ names, blockTokens, lies, onLeftOut, onUnnamed, onChange: () => this.#changed() },
      credit: (place, keys, parent) => this.#credit(place, keys, parent),
      doubt: (keys) => this.#doubt(keys),
      drop: (namespace) => this.#drop(namespace),
    });
  }

  /** It names blocks as an engine does that hashes otherwise than we do. */
  get isRenamed(): boolean {
    return this.#names !== undefined;
  }

  /** Namespaces that it has told of; of renamed ones those of which a block is at hand where all have it. */
  get namespaces(): readonly string[] {
    return this.#names === undefined ? [...this.#parts.keys()] : this.#needed;
  }

  /** Why nothing is known of what it holds, though it tells. */
  get problem(): Problem | undefined {
    return this.#names?.problem;
  }

  partOf(namespace: string): Part | undefined {
    return this.#parts.get(namespace);
  }

  /** As EngineListing's. */
  *apply(item: StreamItem<PackedBatch>): Generator<void, boolean> {
    tellUnread(item, this.#options.lies);
    if (item.kind === 'restarted') {
      this.#names?.restarted();
      return this.#leave();
    }
    if (item.kind !== 'batch') {
      this.#options.shared.voided(this.#options.teller);
      return this.#void();
    }
    const namespace = namespaceIn(item.topic);
    yield* this.#slicer.inTurns(this.#events(namespace, item.batch));
    const isOther = this.#needs() || this.#parts.size !== this.#partsTold;
    this.#partsTold = this.#parts.size;
    return isOther;
  }

  /** All that it said is void, and its names are of no use any more. */
  forget(): boolean {
    const had = this.#leave();
    this.#names?.forget();
    this.#needed = [];
    return had;
  }

  /** It goes on, or begins anew. */
  #leave(): boolean {
    this.#options.shared.left(this.#options.teller);
    return this.#void();
  }

  #void(): boolean {
    this.#names?.voided();
    return this.#close();
  }

  /** Whether other namespaces are needed than before. */
  #needs(): boolean {
    const needed = this.#names?.current() ?? [];
    if (needed.length === this.#needed.length && needed.every((one, i) => one === this.#needed[i])) return false;
    this.#needed = needed;
    return true;
  }

  #close(): boolean {
    const had = this.#parts.size > 0;
    for (const part of this.#parts.values()) part.close();
    this.#parts.clear();
    this.#partsTold = 0;
    return had;
  }

  *#events(namespace: string, batch: PackedBatch): Generator<number, void> {
    for (const event of eventsIn(batch)) yield* this.#event(namespace, event, batch.ts);
  }

  *#event(namespace: string, event: PackedEvent, atS: number): Generator<number, void> {
    const { blockTokens, lies, shared, teller } = this.#options;
    const medium = event.medium === undefined ? undefined : mediumOf(event.medium);
    if (medium === undefined || medium === mediumNumbers.gpu) {
      lies.tell('medium', () => `blocks on ${event.medium ?? 'no medium'}, which no cache node has`);
      return;
    }
    if (medium === mediumNumbers.peer) return;
    if (this.#names !== undefined) {
      yield* this.#renamed(this.#names, { namespace, medium }, event, atS);
      return;
    }
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

  /** An event of blocks that have other names than ours. */
  *#renamed(names: NodeNames, place: Place, event: PackedEvent, atS: number): Generator<number, void> {
    const { shared, teller } = this.#options;
    const { namespace, medium } = place;
    const isShared = sharedMedia.includes(medium);
    if (event.type === recordType.stored) {
      yield* names.stored(place, event, atS);
      return;
    }
    if (event.type === recordType.cleared) {
      names.cleared(place);
      if (isShared) yield* shared.event(teller, namespace, medium, event);
      else this.#parts.get(namespace)?.cleared(medium);
      yield 1;
      return;
    }
    for (const slice of slices(event.keys)) {
      // First: what another node names meanwhile is not credited here.
      names.removed(place, slice);
      const keys = names.own(slice);
      if (isShared) yield* shared.event(teller, namespace, medium, { type: event.type, keys });
      else this.#parts.get(namespace)?.removed(medium, keys);
      yield slice.length / 2;
    }
  }

  /** Blocks by our names. */
  *#credit({ namespace, medium }: Place, keys: Keys, parent: Parent): Generator<number, void> {
    const { lies, shared, teller, maxBlocks } = this.#options;
    if (sharedMedia.includes(medium)) {
      yield* shared.event(teller, namespace, medium, { type: recordType.stored, keys });
      return;
    }
    const part = this.#parts.get(namespace) ?? this.#partOf(namespace);
    if (part?.stored(medium, keys, parent) === false)
      lies.tell('too_many_blocks', () => `more than ${maxBlocks} blocks`);
    yield keys.length / 2;
  }

  /** It is not to be credited with these any more. */
  #doubt(keys: Keys): void {
    for (const part of this.#parts.values()) for (const medium of localMedia) part.removed(medium, keys);
    this.#options.shared.doubt(keys);
  }

  #drop(namespace: string): void {
    this.#parts.get(namespace)?.close();
    // Its number is free, and must not be asked for.
    if (this.#parts.delete(namespace)) this.#changed();
  }

  /** What another node told may have made its namespaces others. */
  #changed(): void {
    const isOther = this.#needs() || this.#parts.size !== this.#partsTold;
    this.#partsTold = this.#parts.size;
    if (isOther) this.#options.onChange?.();
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

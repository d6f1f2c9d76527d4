/**
 * A tier with a codec: encodes what it writes where that pays, decodes what it reads, and says what it saved.
 *
 *     write: slot ──encode──▶ slot on loan ──▶ inner tier          read: inner tier ──▶ slot ──decode in place──▶ slot
 *
 * The inner tier sees sound objects with fewer bytes. With codec "none" nothing is encoded, but what an earlier life
 * encoded is still read. Invariant: a block is 'ready' only with the bytes and the checksum that it had when it was written.
 *
 * The next blocks are encoded while the first ones are written: a tier that gathers what it writes would have few of them at a time.
 * So a write has a slot on loan for each block that it has encoded, until that is written: as many bytes as its caller pins, which are
 * `writeDownsIdle` batches of `writeDownBatchBytes` for each tier (a quarter of the arena at most for each that has a codec, and not
 * for all of them together). Without a slot a block is written as it is.
 */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import { decodeHeader, type HashKey, headerBytes, type Namespace, slotBytesFor } from '@kvtier/identity';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import type { ArenaSlots } from '../disk/options.ts';
import { followInPages } from '../kit/followers.ts';
import { settled } from '../kit/settled.ts';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  SlotSizes,
  Tier,
  TierChange,
  TierStats,
  TierSupports,
  WriteStatus,
} from '../kit/tier.ts';
import { CodecChoice } from './choice.ts';
import { decodeObject, encodeObject, plainHeader } from './codec.ts';
import type { Width } from './encoded.ts';

export const codecNames = ['none', 'lz4', 'planes+lz4'] as const;
export type CodecName = (typeof codecNames)[number];

export interface CodecTierOptions {
  readonly inner: Tier;
  readonly codec: CodecName;
  readonly arena: ArenaHandle;
  readonly memory: ArenaMemory;
  /** Lends the slots that encoded objects are written from. */
  readonly slots: ArenaSlots;
  /** Monotonic microseconds. */
  readonly nowUs: () => number;
}

/** The widths that a codec tries: KV is bf16 or fp16 (2 bytes) or fp32 (4). */
const widthsOf: Record<CodecName, readonly Width[]> = { none: [], lz4: [1], 'planes+lz4': [2, 4] };
/** Blocks of one write that are encoded at the same time. */
const maxEncoding = 4;
/** Namespaces about which anything is remembered; the one that came first is forgotten first. */
const maxNamespaces = 256;

export class CodecTier implements Tier {
  readonly #options: CodecTierOptions;
  readonly #choices = new Map<string, CodecChoice>();
  /** By namespace, whose blocks are all of one size: the largest decoded object that was written or read. */
  readonly #slotBytes = new Map<string, number>();
  readonly #counts = { codec_raw_bytes: 0, codec_stored_bytes: 0, codec_saved_bytes: 0, codec_plain_blocks: 0 };

  constructor(options: CodecTierOptions) {
    this.#options = options;
  }

  get name(): string {
    return this.#options.inner.name;
  }

  get supports(): TierSupports {
    return this.#options.inner.supports;
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    return this.#options.inner.lookup(namespace, hashes);
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#options.inner.touch(namespace, hashes);
  }

  /** Known for namespaces of which this life has written or read a block: a slot of the encoded size would be too small. */
  objectBytes(namespace: Namespace, hash: HashKey, guess?: number): number | undefined {
    const { inner } = this.#options;
    const slotBytes = this.#slotBytes.get(namespace.key) ?? guess;
    if (slotBytes === undefined || inner.lookup(namespace, [hash]) === 0) return undefined;
    return Math.max(slotBytes, inner.objectBytes?.(namespace, hash) ?? 0);
  }

  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const { inner, slots, codec } = this.#options;
    for (const { slot } of blocks) this.#learn(namespace, slots.slotBytesOf(slot));
    if (codec === 'none') return inner.write(namespace, blocks);
    const groups: Promise<WriteStatus[]>[] = [];
    for (let first = 0; first < blocks.length; first += maxEncoding) {
      const group = blocks.slice(first, first + maxEncoding);
      const loans: number[] = [];
      const encoding = settled(group.map((block) => this.#encode(namespace, block, loans)));
      const writing = this.#writeEncoded(namespace, encoding, loans);
      groups.push(writing);
      writing.catch(() => {}); // heard of when all have ended
      await encoding.catch(() => {});
    }
    return (await settled(groups)).flat();
  }

  async #writeEncoded(
    namespace: Namespace,
    encoding: Promise<readonly SlotBlock[]>,
    loans: readonly number[],
  ): Promise<WriteStatus[]> {
    const { inner, slots } = this.#options;
    try {
      return await inner.write(namespace, await encoding);
    } finally {
      for (const slot of loans) slots.free(slot);
    }
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes: SlotSizes = 'known',
  ): Promise<void> {
    const { inner, nowUs } = this.#options;
    const startUs = nowUs();
    const decoding: Promise<void>[] = [];
    const ended = (index: number, status: ReadStatus): void => {
      const tierUs = nowUs() - startUs;
      const decoded =
        status === 'ready' ? this.#decode(namespace, blocks[index]!, tierUs / blocks.length, sizes) : undefined;
      if (decoded === undefined) onDone(index, status);
      else decoding.push(decoded.then((sound) => onDone(index, sound)));
    };
    const reading = inner.read(namespace, blocks, ended, sizes);
    // What is decoded is written into its slot, whatever became of the other blocks.
    await reading.finally(() => settled(decoding));
  }

  endPin(namespace: Namespace, ticket: Buffer, hash: HashKey): void {
    this.#options.inner.endPin?.(namespace, ticket, hash);
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    return this.#options.inner.remove(namespace, hashes, reason);
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#options.inner.follow(listener);
  }

  followInPages(listener: (change: TierChange) => void, onMore?: () => void): Following {
    return followInPages(this.#options.inner, listener, onMore);
  }

  stats(): TierStats {
    const stats = this.#options.inner.stats();
    return this.#options.codec === 'none' ? stats : { ...stats, detail: { ...stats.detail, ...this.#counts } };
  }

  checkIntegrity(): void {
    this.#options.inner.checkIntegrity();
  }

  close(): Promise<void> {
    return this.#options.inner.close();
  }

  /** The block to write: encoded, in a slot on loan, or as it is. */
  async #encode(namespace: Namespace, block: SlotBlock, loans: number[]): Promise<SlotBlock> {
    const { arena, memory, slots, inner } = this.#options;
    const header = plainHeader(arena, block.slot);
    if (header === undefined || inner.lookup(namespace, [block.hash]) === 1) return block;
    const choice = this.#choiceOf(namespace);
    const width = choice.next();
    const target = width === undefined ? undefined : slots.allocate(namespace, header.payloadBytes);
    if (target !== undefined) loans.push(target);
    const stored =
      width === undefined || target === undefined
        ? undefined
        : await encodeObject({ arena, memory }, header, block.slot, target, width);
    if (width !== undefined && target !== undefined) {
      const pays = choice.encoded(width, header.payloadBytes, stored ?? header.payloadBytes);
      if (pays && stored !== undefined) {
        this.#counts.codec_raw_bytes += header.payloadBytes;
        this.#counts.codec_stored_bytes += stored;
        this.#counts.codec_saved_bytes += header.payloadBytes - stored;
        return { hash: block.hash, slot: target };
      }
    }
    this.#counts.codec_plain_blocks++;
    return block;
  }

  /** Undefined: the object was not encoded. `tierUs`: this block's share of the read's time. */
  #decode(namespace: Namespace, block: SlotBlock, tierUs: number, sizes: SlotSizes): Promise<ReadStatus> | undefined {
    const { arena, memory, slots, inner, nowUs } = this.#options;
    const header = decodeHeader(native.arenaRead(arena, block.slot, headerBytes));
    if ('error' in header) return undefined;
    if (header.codec === 0) {
      this.#learn(namespace, slotBytesFor(header.payloadBytes));
      return undefined;
    }
    const choice = this.#choiceOf(namespace);
    choice.read(header.payloadBytes, tierUs);
    const startUs = nowUs();
    return decodeObject({ arena, memory }, header, block.slot, slots.slotBytesOf(block.slot)).then((rawBytes) => {
      if (rawBytes === undefined) {
        inner.remove(namespace, [block.hash], 'corrupt');
        return 'corrupt';
      }
      if (rawBytes === 'too large') {
        // As a tier does with what is too large as it is stored; this one cannot see it.
        if (sizes === 'known') inner.remove(namespace, [block.hash], 'misfit');
        return 'missing';
      }
      if (rawBytes === 'foreign') {
        inner.remove(namespace, [block.hash], 'foreign');
        return 'missing';
      }
      if (rawBytes === 'busy') return 'failed';
      choice.decoded(rawBytes, nowUs() - startUs);
      this.#learn(namespace, slotBytesFor(rawBytes));
      return 'ready';
    });
  }

  #learn({ key }: Namespace, slotBytes: number): void {
    if (slotBytes > (this.#slotBytes.get(key) ?? 0)) remember(this.#slotBytes, key, slotBytes);
  }

  #choiceOf(namespace: Namespace): CodecChoice {
    let choice = this.#choices.get(namespace.key);
    if (choice === undefined) {
      choice = new CodecChoice(widthsOf[this.#options.codec]);
      remember(this.#choices, namespace.key, choice);
    }
    return choice;
  }
}

function remember<T>(map: Map<string, T>, namespaceKey: string, value: T): void {
  map.set(namespaceKey, value);
  const [oldest] = map.keys();
  if (map.size > maxNamespaces) map.delete(oldest!);
}

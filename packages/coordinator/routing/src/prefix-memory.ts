/**
 * What was sent where: a tree of prompts with the workers that got them, for policies that guess what a worker holds. The
 * coordinator's KV index does the work; each worker is a source of its own in it, and forgets the blocks that were sent to
 * it longest ago when it has more than it may (`maxBlocksPerWorker`), or when all together have more than fit: then the worker with
 * the most blocks forgets.
 */
import { type Keys, KvIndex } from '@kvtier/kv-index';

/** Of a block in a set of names: the entry, at a table that is half full at worst, and its name on the heap. */
const orderBytes = 112;

export interface PrefixMemoryOptions {
  /** Half for the index, half for the order in which blocks are forgotten. */
  readonly maxBytes: number;
  /** Infinity: as the bound on bytes allows, or as `sent` says. */
  readonly maxBlocksPerWorker: number;
}

interface Sent {
  readonly source: number;
  /** Those sent the longest ago first. */
  readonly blocks: Set<bigint>;
}

export class PrefixMemory {
  readonly #options: PrefixMemoryOptions;
  readonly #index: KvIndex;
  readonly #sent: (Sent | undefined)[] = [];
  readonly #maxBlocks: number;
  #blocks = 0;

  constructor(options: PrefixMemoryOptions) {
    this.#options = options;
    this.#index = new KvIndex({ maxBytes: options.maxBytes / 2 });
    this.#maxBlocks = Math.floor(options.maxBytes / 2 / orderBytes);
  }

  get bytes(): number {
    return this.#index.stats().bytes + this.#blocks * orderBytes;
  }

  /** How many leading blocks of the prompt each of these workers got before. */
  match(keys: Keys, workers: readonly number[]): number[] {
    const targets = workers.map((worker) => ({ sources: [this.#of(worker).source] }));
    return this.#index.match(keys, targets).map(({ blocks }) => blocks);
  }

  /** Blocks that a worker is thought to hold. */
  size(worker: number): number {
    return this.#of(worker).blocks.size;
  }

  /** `maxBlocks`: of this worker, where that follows from the blocks' size. */
  sent(keys: Keys, worker: number, maxBlocks: number = this.#options.maxBlocksPerWorker): void {
    const to = this.#of(worker);
    const { source, blocks } = to;
    const before = blocks.size;
    const words = new BigInt64Array(keys.buffer, keys.byteOffset, Math.min(keys.length / 2, this.#maxBlocks));
    let end = words.length;
    // From the last block on, so that a chain is forgotten from its tail; what is new is stored in stretches.
    for (let i = words.length - 1; i >= 0; i--) {
      if (blocks.delete(words[i]!)) {
        this.#store(source, keys, i + 1, end);
        end = i;
      }
      blocks.add(words[i]!);
    }
    this.#store(source, keys, 0, end);
    this.#blocks += blocks.size - before;
    this.#forget(to, blocks.size - maxBlocks);
    while (this.#blocks > this.#maxBlocks) {
      const largest = this.#largest();
      this.#forget(largest, Math.min(this.#blocks - this.#maxBlocks, largest.blocks.size));
    }
  }

  left(worker: number): void {
    const sent = this.#sent[worker];
    if (sent === undefined) return;
    this.#index.removeSource(sent.source);
    this.#blocks -= sent.blocks.size;
    this.#sent[worker] = undefined;
  }

  /** So many blocks, those sent the longest ago. */
  #forget({ source, blocks }: Sent, count: number): void {
    if (count <= 0) return;
    const gone = new BigInt64Array(count);
    let at = 0;
    for (const block of blocks) {
      if (at === count) break;
      gone[at++] = block;
      blocks.delete(block);
    }
    this.#blocks -= count;
    this.#index.removed(source, 0, new Int32Array(gone.buffer));
  }

  #largest(): Sent {
    let largest: Sent | undefined;
    for (const sent of this.#sent) if (sent && sent.blocks.size > (largest?.blocks.size ?? 0)) largest = sent;
    return largest!;
  }

  #store(source: number, keys: Keys, from: number, to: number): void {
    if (from >= to) return;
    const parent = from === 0 ? 'root' : keys.subarray(2 * from - 2, 2 * from);
    this.#index.stored(source, 0, keys.subarray(2 * from, 2 * to), parent);
  }

  #of(worker: number): Sent {
    let sent = this.#sent[worker];
    if (sent === undefined) {
      sent = { source: this.#index.addSource(), blocks: new Set() };
      this.#sent[worker] = sent;
    }
    return sent;
  }
}

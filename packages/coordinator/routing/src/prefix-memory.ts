/**
 * What was sent where: a tree of prompts with the workers that got them, for policies that guess what a worker holds. The
 * coordinator's KV index does the work; each worker is a source of its own in it, and forgets the blocks that were sent to
 * it longest ago when it has more than `maxBlocksPerWorker`, or when all together have more than fit: then the worker with
 * the most blocks forgets.
 */
import { type Keys, KvIndex } from '@kvtier/kv-index';

/** Of a block in a map by its name: the entry, at a table that is half full at worst, and its name on the heap. */
const orderBytes = 112;

export interface PrefixMemoryOptions {
  /** Half for the index, half for the order in which blocks are forgotten. */
  readonly maxBytes: number;
  /** Infinity: as the bound on bytes allows. */
  readonly maxBlocksPerWorker: number;
  /** Blocks not sent for so long are forgotten; Infinity: never. */
  readonly ttlMs: number;
}

interface Sent {
  readonly source: number;
  /** Block → when it was last sent, the longest ago first. */
  readonly blocks: Map<bigint, number>;
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

  sent(keys: Keys, worker: number, nowMs: number): void {
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
      blocks.set(words[i]!, nowMs);
    }
    this.#store(source, keys, 0, end);
    this.#blocks += blocks.size - before;
    const { maxBlocksPerWorker, ttlMs } = this.#options;
    this.#forget(to, (at) => blocks.size > maxBlocksPerWorker || nowMs - at > ttlMs);
    while (this.#blocks > this.#maxBlocks) this.#forget(this.#largest(), () => this.#blocks > this.#maxBlocks);
  }

  left(worker: number): void {
    const sent = this.#sent[worker];
    if (sent === undefined) return;
    this.#index.removeSource(sent.source);
    this.#blocks -= sent.blocks.size;
    this.#sent[worker] = undefined;
  }

  /** The blocks sent longest ago, while they are to go. */
  #forget({ source, blocks }: Sent, goes: (sentMs: number) => boolean): void {
    for (const [block, at] of blocks) {
      if (!goes(at)) return;
      blocks.delete(block);
      this.#blocks--;
      this.#index.removed(source, 0, new Int32Array(BigInt64Array.of(block).buffer));
    }
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
      sent = { source: this.#index.addSource(), blocks: new Map() };
      this.#sent[worker] = sent;
    }
    return sent;
  }
}

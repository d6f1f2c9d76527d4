/**
 * Our names of an engine's blocks, by its own: engines that hash otherwise than we do (SGLang, vLLM's default) tell the tokens of each
 * block, and we hash them as we hash prompts. The listing drops a name when the index credits the engine with its block no more. 50 to 60
 * bytes a block, all of which are taken from a budget that every such engine of the model shares.
 */
import { emptyTableBytes, HashTable, none } from '../hash-table.ts';
import type { NamesBudget } from './names-budget.ts';

const chunkBits = 10;
const chunkMask = (1 << chunkBits) - 1;

/** What became of a name: `blocks`: more than this engine can hold; `bytes`: the budget is spent. */
export type Added = 'added' | 'blocks' | 'bytes';

export class HashNames {
  readonly #hashBytes: number;
  readonly #maxBlocks: number;
  readonly #budget: NamesBudget;
  /** undefined: no block is named, and nothing is taken. */
  #table: HashTable | undefined;
  /** The whole hash of each record, as a child's hash begins with it. */
  #chunks: Buffer[] = [];

  constructor(hashBytes: number, maxBlocks: number, budget: NamesBudget) {
    this.#hashBytes = hashBytes;
    this.#maxBlocks = maxBlocks;
    this.#budget = budget;
  }

  /** A view; undefined: not named. */
  find(low: number, high: number): Buffer | undefined {
    const record = this.#table?.find(low, high) ?? none;
    return record === none ? undefined : this.#hashOf(record);
  }

  get count(): number {
    return this.#table?.count ?? 0;
  }

  add(low: number, high: number, hash: Uint8Array): Added {
    let record = this.#table?.find(low, high) ?? none;
    if (record === none) {
      if (this.#table !== undefined && this.#table.count >= this.#maxBlocks) return 'blocks';
      const inserted = this.#insert(low, high);
      if (inserted === undefined) return 'bytes';
      record = inserted;
    }
    this.#hashOf(record).set(hash);
    return 'added';
  }

  drop(low: number, high: number): void {
    const record = this.#table?.find(low, high) ?? none;
    if (record !== none) this.#table!.delete(record);
  }

  /** Drops those of no use, so many records looked at with each `next`. */
  *review(records: number, isOfUse: (hash: Buffer) => boolean): Generator<void, void> {
    for (let record = 0; record < (this.#table?.used ?? 0); record++) {
      if (this.#table!.runOf(record) !== none && !isOfUse(this.#hashOf(record))) this.#table!.delete(record);
      if ((record + 1) % records === 0) yield;
    }
  }

  clear(): void {
    this.#budget.give(this.#bytes);
    this.#table = undefined;
    this.#chunks = [];
  }

  get #bytes(): number {
    return (this.#table?.bytes ?? 0) + this.#chunks.length * this.#chunkBytes;
  }

  get #chunkBytes(): number {
    return this.#hashBytes << chunkBits;
  }

  #insert(low: number, high: number): number | undefined {
    const table = this.#table ?? new HashTable(this.#maxBlocks);
    // A record that was given back has its place for a hash already.
    const isChunk = table.count === table.used && table.used === this.#chunks.length << chunkBits;
    const grown = table.growthFor(low, high) + (isChunk ? this.#chunkBytes : 0);
    if (!this.#budget.take(grown + (this.#table === undefined ? emptyTableBytes : 0))) return undefined;
    this.#table = table;
    if (isChunk) this.#chunks.push(Buffer.alloc(this.#chunkBytes));
    return table.insert(low, high, 0, 0);
  }

  #hashOf(record: number): Buffer {
    const at = (record & chunkMask) * this.#hashBytes;
    return this.#chunks[record >>> chunkBits]!.subarray(at, at + this.#hashBytes);
  }
}

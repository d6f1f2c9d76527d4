/**
 * Our names of an engine's blocks, by its own: engines that hash otherwise than we do (SGLang, vLLM's default) tell the tokens of each
 * block, and we hash them as we hash prompts. The listing drops a name when the index credits the engine with its block no more. 50 to 60
 * bytes a block, all of which are taken from a budget that every such engine of the model shares.
 */
import { emptyTableBytes, HashTable, none } from '../hash-table.ts';
import type { NamesBudget } from './names-budget.ts';

type Budget = Pick<NamesBudget, 'take' | 'give'>;

const chunkBits = 10;
const chunkMask = (1 << chunkBits) - 1;

/** What became of a name: `blocks`: more than this engine can hold; `bytes`: the budget is spent. */
export type Added = 'added' | 'blocks' | 'bytes';

export class HashNames {
  readonly #hashBytes: number;
  #maxBlocks: number;
  readonly #budget: Budget;
  /** undefined: no block is named, and nothing is taken. */
  #table: HashTable | undefined;
  /** The whole hash of each record, as a child's hash begins with it. */
  #chunks: Buffer[] = [];

  constructor(hashBytes: number, maxBlocks: number, budget: Budget) {
    this.#hashBytes = hashBytes;
    this.#maxBlocks = maxBlocks;
    this.#budget = budget;
  }

  /** Another bound from now on; of what is named already nothing goes for it. */
  resize(maxBlocks: number): void {
    this.#maxBlocks = maxBlocks;
    if (this.#table !== undefined) this.#table.maxRecords = maxBlocks;
  }

  /** A view; undefined: not named. */
  find(low: number, high: number): Buffer | undefined {
    const record = this.#table?.find(low, high) ?? none;
    return record === none ? undefined : this.#hashOf(record);
  }

  get count(): number {
    return this.#table?.count ?? 0;
  }

  /** What it was marked with; undefined: not named. */
  markOf(low: number, high: number): number | undefined {
    const record = this.#table?.find(low, high) ?? none;
    return record === none ? undefined : this.#table!.placeOf(record);
  }

  mark(low: number, high: number, mark: number): void {
    const record = this.#table?.find(low, high) ?? none;
    if (record !== none) this.#table!.move(record, 0, mark);
  }

  add(low: number, high: number, hash: Uint8Array, mark = 0): Added {
    let record = this.#table?.find(low, high) ?? none;
    if (record === none) {
      if (this.#table !== undefined && this.#table.count >= this.#maxBlocks) return 'blocks';
      const inserted = this.#insert(low, high, mark);
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

  /**
   * Drops those of no use, so many records looked at with each `next`: those that were found so in the reviews before, too, so many in
   * all. Returns how many are of use.
   */
  *review(records: number, isOfUse: (hash: Buffer) => boolean, patience = 1): Generator<void, number> {
    let ofUse = 0;
    // Others add and drop meanwhile, and may clear all.
    for (let record = 0; record < (this.#table?.used ?? 0); record++) {
      const table = this.#table!;
      if (table.runOf(record) !== none) {
        const found = isOfUse(this.#hashOf(record)) ? 0 : table.foldOf(record) + 1;
        if (found === 0) ofUse++;
        if (found >= patience) table.delete(record);
        else table.setFold(record, found);
      }
      if ((record + 1) % records === 0) yield;
    }
    return ofUse;
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

  #insert(low: number, high: number, mark: number): number | undefined {
    const table = this.#table ?? new HashTable(this.#maxBlocks);
    // A record that was given back has its place for a hash already.
    const isChunk = table.count === table.used && table.used === this.#chunks.length << chunkBits;
    const grown = table.growthFor(low, high) + (isChunk ? this.#chunkBytes : 0);
    if (!this.#budget.take(grown + (this.#table === undefined ? emptyTableBytes : 0))) return undefined;
    this.#table = table;
    if (isChunk) this.#chunks.push(Buffer.alloc(this.#chunkBytes));
    const record = table.insert(low, high, 0, mark);
    table.setFold(record, 0); // it may have been another one's
    return record;
  }

  #hashOf(record: number): Buffer {
    const at = (record & chunkMask) * this.#hashBytes;
    return this.#chunks[record >>> chunkBits]!.subarray(at, at + this.#hashBytes);
  }
}

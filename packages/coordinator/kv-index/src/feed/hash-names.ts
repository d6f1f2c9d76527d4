/**
 * Our names of an engine's blocks, by its own: engines that hash otherwise than we do (SGLang, vLLM's default) tell the tokens of each
 * block, and we hash them as we hash prompts. A name is kept as long as the engine holds its block anywhere. 40 bytes a block and 5 to find it.
 */
import { HashTable, none } from '../hash-table.ts';

const chunkBits = 10;
const chunkMask = (1 << chunkBits) - 1;

export class HashNames {
  readonly #hashBytes: number;
  readonly #maxBlocks: number;
  #table: HashTable;
  /** The whole hash of each record, as a child's hash begins with it. */
  #chunks: Buffer[] = [];

  constructor(hashBytes: number, maxBlocks: number) {
    this.#hashBytes = hashBytes;
    this.#maxBlocks = maxBlocks;
    this.#table = new HashTable(maxBlocks);
  }

  get bytes(): number {
    return this.#table.bytes + this.#chunks.length * this.#hashBytes * (chunkMask + 1);
  }

  /** A view; undefined: not named. */
  find(low: number, high: number): Buffer | undefined {
    const record = this.#table.find(low, high);
    return record === none ? undefined : this.#hashOf(record);
  }

  /** The block is held once more. False: there is no room. */
  add(low: number, high: number, hash: Uint8Array): boolean {
    let record = this.#table.find(low, high);
    if (record === none) {
      if (this.#table.count >= this.#maxBlocks) return false;
      record = this.#table.insert(low, high, 0, 0);
      if (record >>> chunkBits >= this.#chunks.length)
        this.#chunks.push(Buffer.alloc(this.#hashBytes * (chunkMask + 1)));
    }
    this.#hashOf(record).set(hash);
    this.#table.move(record, this.#table.runOf(record) + 1, 0);
    return true;
  }

  /** It is held once less. */
  drop(low: number, high: number): void {
    const record = this.#table.find(low, high);
    if (record === none) return;
    const copies = this.#table.runOf(record) - 1;
    if (copies === 0) this.#table.delete(record);
    else this.#table.move(record, copies, 0);
  }

  clear(): void {
    this.#table = new HashTable(this.#maxBlocks);
    this.#chunks = [];
  }

  #hashOf(record: number): Buffer {
    const at = (record & chunkMask) * this.#hashBytes;
    return this.#chunks[record >>> chunkBits]!.subarray(at, at + this.#hashBytes);
  }
}

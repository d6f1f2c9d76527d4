/**
 * One table of blocks for all workers, with those that each block was sent to: for policies that guess what a worker holds. When there are
 * too many blocks, the one that was sent the longest ago goes, whoever got it; and so does one that was not sent for too long.
 *
 *     block ──▶ when it was last sent · the workers, by their ids          in a Map's order: who was sent the longest ago is first
 *
 * A worker that left has its id no more; what it was sent stays in the table, for nobody, until its block goes or is sent to others.
 */
import type { Keys } from '@kvtier/kv-index';

/** Of a block: the entry in a table that is half full at worst, its name, the record and its list of workers. */
const blockBytes = 112 + 40 + 32;
/** Of a worker in such a list, which may be twice as long as it needs to be. */
const copyBytes = 16;
/** Blocks that are forgotten for their age at one time; what is left goes with the prompts that come next. */
const agedAtOnce = 512;

export interface BlockTableOptions {
  readonly maxBlocks: number;
  readonly maxBytes: number;
  readonly ttlMs: number;
}

interface Sent {
  atMs: number;
  ids: number[];
}

export class BlockTable {
  readonly #options: BlockTableOptions;
  readonly #blocks = new Map<bigint, Sent>();
  readonly #ids: (number | undefined)[] = [];
  readonly #live = new Set<number>();
  #nextId = 0;
  #copies = 0;

  constructor(options: BlockTableOptions) {
    this.#options = options;
  }

  get bytes(): number {
    return this.#blocks.size * blockBytes + this.#copies * copyBytes;
  }

  /** Blocks of all workers. */
  get size(): number {
    return this.#blocks.size;
  }

  /** How many leading blocks of the prompt each of these workers got before. */
  match(keys: Keys, workers: readonly number[]): number[] {
    const matched = new Array<number>(workers.length).fill(0);
    const places = new Map<number, number>();
    for (let i = 0; i < workers.length; i++) {
      const id = this.#ids[workers[i]!];
      if (id !== undefined) places.set(id, i);
    }
    let blocks = 0;
    for (const name of namesOf(keys)) {
      const sent = this.#blocks.get(name);
      if (sent === undefined) break;
      let found = false;
      for (const id of sent.ids) {
        const place = places.get(id);
        // It got all blocks before this one, too.
        if (place === undefined || matched[place] !== blocks) continue;
        matched[place] = blocks + 1;
        found = true;
      }
      if (!found) break;
      blocks++;
    }
    return matched;
  }

  sent(keys: Keys, worker: number, nowMs: number): void {
    const { maxBlocks, maxBytes, ttlMs } = this.#options;
    const id = this.#idOf(worker);
    const names = namesOf(keys);
    // From the last block on, so that a chain is forgotten from its tail.
    for (let i = Math.min(names.length, maxBlocks) - 1; i >= 0; i--) {
      const known = this.#blocks.get(names[i]!);
      const to = known ?? { atMs: nowMs, ids: [] };
      if (known !== undefined) this.#blocks.delete(names[i]!);
      this.#blocks.set(names[i]!, to);
      to.atMs = nowMs;
      if (!to.ids.includes(id)) this.#add(to, id);
    }
    let aged = agedAtOnce;
    for (const [name, { atMs, ids }] of this.#blocks) {
      const isOver = this.#blocks.size > maxBlocks || this.bytes > maxBytes;
      if (!isOver && (nowMs - atMs <= ttlMs || aged-- === 0)) break;
      this.#blocks.delete(name);
      this.#copies -= ids.length;
    }
  }

  /** This number stands for another worker from now on, or for none. */
  left(worker: number): void {
    const id = this.#ids[worker];
    if (id !== undefined) this.#live.delete(id);
    this.#ids[worker] = undefined;
  }

  #idOf(worker: number): number {
    const known = this.#ids[worker];
    if (known !== undefined) return known;
    const id = this.#nextId++;
    this.#ids[worker] = id;
    this.#live.add(id);
    return id;
  }

  /** More than half of those of a block that all ask for would be who left, after some days. */
  #add(to: Sent, id: number): void {
    const before = to.ids.length;
    if (before >= 2 * this.#live.size) to.ids = to.ids.filter((one) => this.#live.has(one));
    to.ids.push(id);
    this.#copies += to.ids.length - before;
  }
}

const namesOf = (keys: Keys): BigInt64Array => new BigInt64Array(keys.buffer, keys.byteOffset, keys.length / 2);

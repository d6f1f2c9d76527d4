/**
 * One table of blocks for all workers, with those that each block was sent to: for policies that guess what a worker holds. When there are
 * too many blocks, the one that was sent the longest ago goes, whoever got it; and so does one that was not sent for too long.
 *
 *     block ──▶ when it was last sent ─┐                in a Map's order: who was sent the longest ago is first
 *     block ──▶ when it was last sent ─┴▶ the workers, by their ids · of how many blocks
 *
 * Blocks that follow each other mostly went to the same workers: they share the list of these, which never changes. So a thousand workers are
 * gone through once for each list of a prompt, and not for each block.
 *
 * A worker that left has its id no more; what it was sent stays in the table, for nobody, until its block goes or is sent to others.
 */
import type { Keys } from '@kvtier/kv-index';

/** Of a block: the entry in a table that is half full at worst, its name and the record. */
const blockBytes = 112 + 40 + 32;
/** Of a list of workers, and of a worker in it. */
const listBytes = 112;
const copyBytes = 8;
/** Blocks that are forgotten for their age at one time; what is left goes with the prompts that come next. */
const agedAtOnce = 512;

export interface BlockTableOptions {
  readonly maxBlocks: number;
  readonly maxBytes: number;
  readonly ttlMs: number;
}

/** Who got a block; of how many blocks that is so. */
interface Got {
  readonly ids: readonly number[];
  blocks: number;
}

interface Sent {
  atMs: number;
  got: Got;
}

export class BlockTable {
  readonly #options: BlockTableOptions;
  readonly #blocks = new Map<bigint, Sent>();
  readonly #ids: (number | undefined)[] = [];
  readonly #live = new Set<number>();
  #nextId = 0;
  #lists = 0;
  /** Workers in all lists. */
  #copies = 0;

  constructor(options: BlockTableOptions) {
    this.#options = options;
  }

  get bytes(): number {
    return this.#blocks.size * blockBytes + this.#lists * listBytes + this.#copies * copyBytes;
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
    let got: Got | undefined;
    /** Places of those that got all blocks before this one. */
    let all = [...places.values()];
    for (const name of namesOf(keys)) {
      const sent = this.#blocks.get(name);
      if (sent === undefined) break;
      if (sent.got !== got) {
        got = sent.got;
        for (const place of all) matched[place] = blocks;
        all = [];
        for (const id of got.ids) {
          const place = places.get(id);
          if (place !== undefined && matched[place] === blocks) all.push(place);
        }
        if (all.length === 0) break;
      }
      blocks++;
    }
    for (const place of all) matched[place] = blocks;
    return matched;
  }

  sent(keys: Keys, worker: number, nowMs: number): void {
    const { maxBlocks, maxBytes, ttlMs } = this.#options;
    const id = this.#idOf(worker);
    const names = namesOf(keys);
    let before: Got | undefined;
    let after: Got | undefined;
    // From the last block on, so that a chain is forgotten from its tail.
    for (let i = Math.min(names.length, maxBlocks) - 1; i >= 0; i--) {
      const known = this.#blocks.get(names[i]!);
      if (after === undefined || known?.got !== before) {
        before = known?.got;
        after = this.#with(id, before);
      }
      this.#counts(after, 1);
      if (known !== undefined) {
        this.#counts(known.got, -1);
        this.#blocks.delete(names[i]!);
      }
      this.#blocks.set(names[i]!, { atMs: nowMs, got: after });
    }
    let aged = agedAtOnce;
    for (const [name, { atMs, got }] of this.#blocks) {
      const isOver = this.#blocks.size > maxBlocks || this.bytes > maxBytes;
      if (!isOver && (nowMs - atMs <= ttlMs || aged-- === 0)) break;
      this.#blocks.delete(name);
      this.#counts(got, -1);
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

  /** The same workers, and this one. Those that left go when they are more than half: after some days a block that all ask for would have many. */
  #with(id: number, got: Got | undefined): Got {
    if (got === undefined) return { ids: [id], blocks: 0 };
    const { ids } = got;
    if (ids.includes(id)) return got;
    const stay = ids.length >= 2 * this.#live.size ? ids.filter((one) => this.#live.has(one)) : ids;
    return { ids: [...stay, id], blocks: 0 };
  }

  /** So many blocks more have this list. */
  #counts(got: Got, blocks: 1 | -1): void {
    const isNew = got.blocks === 0;
    got.blocks += blocks;
    if (!isNew && got.blocks > 0) return;
    this.#lists += blocks;
    this.#copies += blocks * got.ids.length;
  }
}

const namesOf = (keys: Keys): BigInt64Array => new BigInt64Array(keys.buffer, keys.byteOffset, keys.length / 2);

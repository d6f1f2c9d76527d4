/** Random bfloat16 numbers, the same on every machine: one stream per tensor, or, for large models, windows into a pool. */
import type { FileHandle } from 'node:fs/promises';
import { setImmediate as turn } from 'node:timers/promises';
import type { Fill } from './real-shapes.ts';

/** In one turn of the event loop: some 10 ms. */
const pieceCount = 1 << 17;

/** `count` bfloat16 numbers, in pieces so that the event loop breathes. */
export async function writeTensor(file: FileHandle, count: number, fill: Fill, seed: number): Promise<void> {
  const random = gaussian(seed);
  for (let done = 0; done < count; ) {
    const piece = Math.min(pieceCount, count - done);
    await writeAll(file, bfloat16(piece, fill, random));
    done += piece;
  }
}

/**
 * Fills tensors as fast as the disk takes them: pieces of varying length, from varying places of at most 16 MiB of deviates, scaled once
 * per standard deviation. Rows are windows of one long stream: no two rows of a matrix are equal, none is a multiple of another.
 */
export class DeviatePool {
  readonly #unit: Float32Array;
  readonly #scaled = new Map<Fill, Uint8Array>();
  readonly #place = whole(7);

  /** @param total numbers of the whole model */
  static async make(total: number): Promise<DeviatePool> {
    const unit = new Float32Array(Math.min(maxPoolCount, 2 ** Math.ceil(Math.log2(total))));
    const random = gaussian(1);
    for (let i = 0; i < unit.length; i++) {
      if (i % pieceCount === 0) await turn();
      unit[i] = random();
    }
    return new DeviatePool(unit);
  }

  private constructor(unit: Float32Array) {
    this.#unit = unit;
  }

  async write(file: FileHandle, count: number, fill: Fill): Promise<void> {
    const pool = await this.#pool(fill);
    const poolCount = this.#unit.length;
    for (let done = 0; done < count; ) {
      const first = this.#place() % (poolCount / 2);
      const piece = Math.min(count - done, poolCount / 4 + (this.#place() % (poolCount / 4)));
      await writeAll(file, pool.subarray(2 * first, 2 * (first + piece)));
      done += piece;
    }
  }

  async #pool(fill: Fill): Promise<Uint8Array> {
    let pool = this.#scaled.get(fill);
    if (!pool) {
      let at = 0;
      const next = (): number => this.#unit[at++]!;
      pool = new Uint8Array(2 * this.#unit.length);
      for (let done = 0; done < this.#unit.length; done += pieceCount) {
        await turn();
        pool.set(bfloat16(Math.min(pieceCount, this.#unit.length - done), fill, next), 2 * done);
      }
      if (this.#scaled.size === maxPools) this.#scaled.delete(this.#scaled.keys().next().value!);
      this.#scaled.set(fill, pool);
    }
    return pool;
  }
}

const maxPoolCount = 1 << 23;
/** A model has few standard deviations. */
const maxPools = 8;

function bfloat16(count: number, fill: Fill, random: () => number): Uint8Array {
  const floats = new Float32Array(count);
  if (typeof fill !== 'number') floats.fill(fill === 'ones' ? 1 : 0);
  else for (let i = 0; i < count; i++) floats[i] = fill * random();
  const bits = new Uint32Array(floats.buffer);
  const halves = new Uint16Array(count);
  for (let i = 0; i < count; i++) halves[i] = (bits[i]! + 0x8000) >>> 16; // rounds to nearest
  return new Uint8Array(halves.buffer);
}

async function writeAll(file: FileHandle, bytes: Uint8Array): Promise<void> {
  for (let done = 0; done < bytes.length; ) done += (await file.write(bytes, done)).bytesWritten;
}

/** sfc32 (Doty-Humphrey): 32-bit integer steps, fast in JavaScript. */
function whole(seed: number): () => number {
  let a = 0x9e3779b9;
  let b = seed | 0;
  let c = 0x243f6a88;
  let counter = 1;
  const next = (): number => {
    const t = (((a + b) | 0) + counter) | 0;
    counter = (counter + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = ((c << 21) | (c >>> 11)) + t;
    c |= 0;
    return t >>> 0;
  };
  for (let i = 0; i < 16; i++) next();
  return next;
}

/** Normal deviates by Marsaglia's polar method. */
function gaussian(seed: number): () => number {
  const step = whole(seed);
  const next = (): number => step() / 2 ** 31 - 1; // [-1, 1)
  let spare = Number.NaN;
  return () => {
    if (!Number.isNaN(spare)) {
      const value = spare;
      spare = Number.NaN;
      return value;
    }
    for (;;) {
      const x = next();
      const y = next();
      const s = x * x + y * y;
      if (s === 0 || s >= 1) continue;
      const factor = Math.sqrt((-2 * Math.log(s)) / s);
      spare = y * factor;
      return x * factor;
    }
  };
}

/**
 * Whether encoding pays, for the blocks of one namespace: decided by samples, asked again now and then. Pure.
 *
 * It pays when it saves a tenth of the bytes and a read gets no slower by it: the time that the saved bytes would take at
 * the tier's rate must be longer than decoding takes. As long as nothing was read, the bytes alone decide.
 */
import type { Width } from './encoded.ts';

/** One block in this many is a sample when encoding does not pay. */
export const sampleEvery = 64;
const maxStoredShare = 0.9;
/** Weight of the newest measurement. */
const newShare = 0.2;

export class CodecChoice {
  /** For each width that is tried: stored ÷ raw bytes, smoothed. */
  readonly #shares = new Map<Width, number>();
  readonly #widths: readonly Width[];
  #blocks = 0;
  #tierUsPerByte: number | undefined;
  #decodeUsPerByte: number | undefined;

  constructor(widths: readonly Width[]) {
    this.#widths = widths;
  }

  /** How to encode the next block; undefined: not at all. */
  next(): Width | undefined {
    const index = this.#blocks++;
    // The first blocks try every width, then every 64th block tries one, in turn.
    const untried = this.#widths.find((width) => !this.#shares.has(width));
    if (untried !== undefined) return untried;
    if (index % sampleEvery === 0) return this.#widths[(index / sampleEvery) % this.#widths.length];
    const best = this.#best();
    return this.#pays(this.#shares.get(best)!) ? best : undefined;
  }

  /** Whether this result is worth storing. */
  encoded(width: Width, rawBytes: number, storedBytes: number): boolean {
    const share = storedBytes / rawBytes;
    const before = this.#shares.get(width);
    this.#shares.set(width, before === undefined ? share : before + newShare * (share - before));
    return share <= maxStoredShare && this.#pays(share);
  }

  /** A read of `storedBytes` took the tier so long. */
  read(storedBytes: number, us: number): void {
    this.#tierUsPerByte = smooth(this.#tierUsPerByte, us / storedBytes);
  }

  decoded(rawBytes: number, us: number): void {
    this.#decodeUsPerByte = smooth(this.#decodeUsPerByte, us / rawBytes);
  }

  #best(): Width {
    return this.#widths.reduce((best, width) => (this.#shares.get(width)! < this.#shares.get(best)! ? width : best));
  }

  #pays(share: number): boolean {
    if (share > maxStoredShare) return false;
    if (this.#tierUsPerByte === undefined || this.#decodeUsPerByte === undefined) return true;
    return (1 - share) * this.#tierUsPerByte > this.#decodeUsPerByte;
  }
}

const smooth = (before: number | undefined, value: number): number =>
  before === undefined ? value : before + newShare * (value - before);

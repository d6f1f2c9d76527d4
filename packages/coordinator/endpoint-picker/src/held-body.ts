/** A request's body that is held until a worker is found, within what may be held of one and of all. */
import type { HeldBytes } from './held-bytes.ts';

export class HeldBody {
  readonly #held: HeldBytes;
  readonly #mostBytes: number;
  #pieces: Buffer[] = [];
  #bytes = 0;

  constructor(held: HeldBytes, mostBytes: number) {
    this.#held = held;
    this.#mostBytes = mostBytes;
  }

  /** As they came; those of now, whatever is released later. */
  get pieces(): Buffer[] {
    return this.#pieces;
  }

  get bytes(): number {
    return this.#bytes;
  }

  /** Whether there is room to hold it; what is held already stays. */
  hold(piece: Buffer): boolean {
    if (this.#bytes + piece.length > this.#mostBytes) return false;
    if (!this.#held.take(piece.length)) return false;
    this.#bytes += piece.length;
    if (piece.length > 0) this.#pieces.push(piece);
    return true;
  }

  release(): void {
    this.#held.give(this.#bytes);
    this.#bytes = 0;
    this.#pieces = [];
  }
}

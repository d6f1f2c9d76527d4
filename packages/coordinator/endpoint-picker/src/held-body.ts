/** A request's body that is held until a worker is found, within what may be held of one and of all. */
import { setImmediate as nextTurn } from 'node:timers/promises';
import type { HeldBytes } from './held-bytes.ts';

/** Copied in one turn of the event loop: memory that is touched for the first time costs some milliseconds a MiB. */
const turnBytes = 1 << 20;

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

/** All of it as one, in short turns of the event loop. @throws the reason of `signal` */
export async function joined(pieces: readonly Buffer[], signal: AbortSignal): Promise<ArrayBuffer> {
  const whole = new Uint8Array(pieces.reduce((sum, { length }) => sum + length, 0));
  let at = 0;
  let left = turnBytes;
  for (const piece of pieces) {
    for (let from = 0; from < piece.length; ) {
      const part = piece.subarray(from, from + left);
      whole.set(part, at);
      at += part.length;
      from += part.length;
      left -= part.length;
      if (left > 0) continue;
      await nextTurn(undefined);
      if (signal.aborted) throw signal.reason;
      left = turnBytes;
    }
  }
  return whole.buffer;
}

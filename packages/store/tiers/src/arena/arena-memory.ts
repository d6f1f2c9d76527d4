/**
 * The arena's memory as Buffers, without a copy, for the tiers whose bytes come through a socket: received straight into a
 * slot, sent straight out of it (law 4).
 *
 * Windows of 2 GiB every 1 GiB, made when first used: an external Buffer costs V8 about 100 µs at these sizes, a `subarray` of
 * one about 0.1 µs, and Node 20 has none above 4 GiB. Invariant: any slot of up to 1 GiB lies whole in one window.
 */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';

const strideBytes = 2 ** 30;
/** Slots begin behind the arena's first page. */
const firstOffset = 4096;

export class ArenaMemory {
  readonly #arena: ArenaHandle;
  readonly #arenaBytes: number;
  readonly #windows: Buffer[] = [];

  constructor(arena: ArenaHandle, arenaBytes: number) {
    this.#arena = arena;
    this.#arenaBytes = arenaBytes;
  }

  /** `bytes` at `offset`: valid as long as the caller holds the slot, and only for reading and writing that slot. */
  view(offset: number, bytes: number): Buffer {
    const window = Math.floor(offset / strideBytes);
    const start = Math.max(firstOffset, window * strideBytes);
    invariant(
      offset >= firstOffset && bytes <= strideBytes && offset + bytes <= this.#arenaBytes,
      'arena memory: outside the arena, or more than 1 GiB at once',
    );
    this.#windows[window] ??= native.arenaView(
      this.#arena,
      start,
      Math.min(window * strideBytes + 2 * strideBytes, this.#arenaBytes) - start,
    );
    return this.#windows[window].subarray(offset - start, offset - start + bytes);
  }
}

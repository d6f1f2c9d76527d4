/**
 * Full blocks on their way to the tier. Each one is held in the pool until the connector says that its bytes are no
 * longer needed, so that no preemption, end of request or reuse can change them under the copy.
 *
 * Invariant: exports hold at most `maxBlocks` blocks, because what they hold cannot serve a request that needs room.
 * Past that nothing waits: a request's blocks are offered later if it lives long enough, else counted as skipped. Blocks
 * are offered in chain order without a gap, because a block whose parent is missing in the tier is never found.
 */
import type { Connector } from '@kvtier/connector';
import { invariant } from '@kvtier/errors';
import type { PrefixCache } from '@kvtier/prefix-cache';
import type { EngineRequest } from './request.ts';

export class Exports {
  readonly #kv: PrefixCache;
  readonly #connector: Connector;
  readonly #maxBlocks: number;
  readonly #onReleased: () => void;
  #heldBlocks = 0;
  #exportedBlocks = 0;
  #skippedBlocks = 0;

  /** `onReleased`: there may be room now for somebody who waits. */
  constructor(kv: PrefixCache, connector: Connector, maxBlocks: number, onReleased: () => void) {
    this.#kv = kv;
    this.#connector = connector;
    this.#maxBlocks = maxBlocks;
    this.#onReleased = onReleased;
  }

  get heldBlocks(): number {
    return this.#heldBlocks;
  }

  get exportedBlocks(): number {
    return this.#exportedBlocks;
  }

  get skippedBlocks(): number {
    return this.#skippedBlocks;
  }

  /** Offer the full blocks of a request that it has not offered yet: its hits too, the tier may have lost them. */
  offer(request: EngineRequest): void {
    if (!this.#connector.attached) return;
    const first = request.offeredBlocks;
    const end = Math.min(this.#fullBlocks(request), first + this.#maxBlocks - this.#heldBlocks);
    if (end <= first) return;
    request.offeredBlocks = end;
    const blocks = this.#kv.blockTables(request.id)[0]!.slice(first, end);
    const letGo = this.#kv.hold(blocks);
    this.#heldBlocks += blocks.length;
    this.#exportedBlocks += blocks.length;
    let released = false;
    this.#connector.store(request.hashes.packed, first, Int32Array.from(blocks), () => {
      invariant(!released, () => `request ${request.id}: the connector released its blocks twice`);
      released = true;
      this.#heldBlocks -= blocks.length;
      letGo();
      this.#onReleased();
    });
  }

  /** The request lets its blocks go: what has not been offered will not be. */
  giveUp(request: EngineRequest): void {
    if (!this.#connector.attached) return;
    this.#skippedBlocks += Math.max(this.#fullBlocks(request) - request.offeredBlocks, 0);
  }

  #fullBlocks(request: EngineRequest): number {
    return Math.floor(request.computedTokens / this.#kv.blockTokens);
  }
}

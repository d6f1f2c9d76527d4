/**
 * Full blocks on their way to the tier. Each one is held in the pool until the connector says that its bytes are no
 * longer needed, so that no preemption, end of request or reuse can change them under the copy.
 *
 * Invariant: exports hold at most `maxBlocks` blocks, because what they hold cannot serve a request that needs room; what several of them
 * hold counts once. And no more is offered than the connector has room for: what it left out would be missing in its chain for good.
 * Past that nothing waits: a request's blocks are offered later if it lives long enough, else counted as skipped. Blocks
 * are offered in chain order without a gap, because a block whose parent is missing in the tier is never found. What was lost on its way
 * is offered again for the same reason, a few times (offers.ts): while the request has its blocks, and after its end, behind a pause, what is
 * found of them.
 *
 * In a group with a sliding window only those blocks are offered that a hit at the end of the offer looks at: after each
 * step the last window before its last full block. So the tier can be hit at the end of every prefill chunk, where the
 * same prompt comes again, and at every block that was decoded; what lies behind those windows is never stored.
 *
 *     full     ■ ■ ■ ■ ■ ■ ■ ■ | ■ ■ ■ ■ ■ | ■ | ■        offers of two prefill chunks, then of decode steps
 *     window   · · · · · ■ ■ ■ | · · ■ ■ ■ | ■ | ■        with a window of three blocks: hits at 8, 13, 14, 15
 *
 * Blocks of a prompt that is being computed are gathered, up to `gatherBlocks`: what an export costs besides its copy is paid
 * once, and for most prompts after their first token. Offers then wait for `send`, which comes when the next step is under way, or
 * when there is none, and what callers were told has left: what an export costs this thread then delays neither a step nor a request's
 * first token.
 *
 * What is computed for another worker is offered as it fills up, and not ahead of eviction: somebody waits for it.
 *
 * With `ahead` a block that fills up is only noted, and `goDown` chooses what goes, among the free blocks too. These keep
 * their place in the order of eviction, and at most half of what is free is held at a time: an allocation never waits for
 * a copy, it takes other blocks.
 */

import { invariant } from '@kvtier/errors';
import { type GroupBlocks, type KvCacheManager, nullBlock, type PrefixCache } from '@kvtier/prefix-cache';
import type { Connector, StoreOptions } from './connector.ts';
import { HeldByExports } from './held-by-exports.ts';
import { type Offer, Offers } from './offers.ts';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';
import { WriteDownAhead } from './write-down-ahead.ts';

/** Not all blocks go down, see write-down-ahead.ts. For hashed blocks of one group of full attention. */
export interface AheadOptions {
  readonly kv: KvCacheManager;
  readonly hashBytes: number;
  /** Blocks in the order of eviction that go down before they are reused. */
  readonly aheadBlocks: number;
}

/**
 * Of blocks that were computed for another worker: the tier holds `first`..`end`-1, and not what of the offer lies behind. `isBusy`:
 * somebody else is writing that. `epoch`: of the node's boot when they were offered.
 */
export type OnSettled = (
  request: EngineRequest,
  first: number,
  end: number,
  isBusy: boolean,
  epoch: bigint | undefined,
) => void;

export class Exports {
  readonly #kv: PrefixCache;
  readonly #connector: Connector;
  readonly #clock: Clock;
  readonly #maxBlocks: number;
  readonly #gatherBlocks: number;
  readonly #onReleased: () => void;
  readonly #onSettled: OnSettled | undefined;
  readonly #ahead: AheadOptions | undefined;
  readonly #writeDown: WriteDownAhead | undefined;
  /** Held already; the connector does not know of them yet. */
  #unsent: (() => void)[] = [];
  #unsentBlocks = 0;
  /** The connector's room was too small for what was there, or may have been. */
  #isCut = false;
  readonly #held = new HeldByExports();
  readonly #counts = { exported: 0, skipped: 0 };
  #isEnding = false;
  #paused = 0;

  /** `onReleased`: there may be room now for somebody who waits. */
  constructor(
    kv: PrefixCache,
    connector: Connector,
    clock: Clock,
    maxBlocks: number,
    gatherBlocks: number,
    onReleased: () => void,
    ahead?: AheadOptions | undefined,
    onSettled?: OnSettled,
  ) {
    this.#kv = kv;
    this.#connector = connector;
    this.#clock = clock;
    this.#maxBlocks = maxBlocks;
    this.#gatherBlocks = Math.min(gatherBlocks, Math.ceil(maxBlocks / 2)); // the next ones find room while these are copied
    this.#onReleased = onReleased;
    this.#onSettled = onSettled;
    this.#ahead = ahead;
    if (!ahead) return;
    const isCached = (block: number, hash: Buffer): boolean => ahead.kv.cachedHash(block) === hash.toString('latin1');
    this.#writeDown = new WriteDownAhead(ahead.kv.blockCount, ahead.hashBytes, isCached);
  }

  get heldBlocks(): number {
    return this.#held.count;
  }

  /** Offers that were lost and are made again after a pause. Meanwhile nothing holds their blocks, and the connector does not know of them. */
  get pausedOffers(): number {
    return this.#paused;
  }

  /** The tier holds them, as it has said. */
  get exportedBlocks(): number {
    return this.#counts.exported;
  }

  /** Never offered, or not held when the tier had answered. */
  get skippedBlocks(): number {
    return (this.#writeDown?.lostBlocks ?? 0) + this.#counts.skipped;
  }

  /**
   * Offer the full blocks of a request that it has not offered yet: its hits too, the tier may have lost them. `now`: though more of its
   * prompt is to be computed.
   */
  offer(request: EngineRequest, now = false): void {
    if (this.#writeDown && !request.prefillOnly) {
      this.#note(this.#writeDown, request);
      return;
    }
    if (now) {
      this.#offer(request);
      return;
    }
    const waiting = this.#fullBlocks(request) - request.offeredBlocks;
    const gather = request.prefillOnly ? 1 : this.#gatherBlocks;
    if (request.computedTokens < request.promptTokens && waiting < gather) return;
    this.#offer(request);
  }

  #offer(request: EngineRequest): void {
    if (!this.#connector.attached) return;
    const first = request.offeredBlocks;
    if (this.#fullBlocks(request) <= first) return;
    const tables = this.#tables(request, first);
    const end = first + this.#columnsWithin(tables);
    if (end <= first) return;
    request.offeredBlocks = end;
    request.offers ??= new Offers(this.#counts, request.prefillOnly !== undefined);
    this.#offerRows(request, request.offers, first, end, tables);
  }

  /** `tables`: from block `first` of the chain on. */
  #offerRows(request: EngineRequest, offers: Offers, first: number, end: number, tables: GroupBlocks): void {
    const rows = tables.map((table) => table.slice(0, end - first));
    const blocks = rows.flat().filter((block) => block !== nullBlock);
    this.#store(request.hashes.packed, first, rows, blocks, this.#kv.hold(blocks), offers, request);
  }

  /** What is due now, with `ahead`: called when a step has been put together, so that copies run beside it. */
  goDown(): void {
    if (!this.#ahead || !this.#writeDown || !this.#connector.attached) return;
    const { kv, aheadBlocks } = this.#ahead;
    const held = this.#held.count;
    const share = Math.floor((kv.freeBlockCount + held) / 2);
    const ownRoom = Math.min(this.#maxBlocks, share) - held;
    const room = Math.min(ownRoom, this.#storeRoom);
    // What is left of it then is due again when there is room, and no step may come by itself.
    if (room < ownRoom) this.#isCut = true;
    if (room <= 0) return;
    for (const { hashes, firstBlock, blockIds } of this.#writeDown.takeDue(kv.nextEvicted(aheadBlocks), room))
      this.#store(hashes, firstBlock, [blockIds], blockIds, kv.holdInPlace(blockIds), new Offers(this.#counts));
  }

  /** Hand to the connector what was offered since the last time. */
  send(): void {
    this.#unsentBlocks = 0; // the connector counts them from here on
    for (const store of this.#unsent.splice(0)) store();
  }

  /** From now on nothing that was lost is offered again. */
  end(): void {
    this.#isEnding = true;
  }

  /** Of one that computes for another worker: what it has offered from block `from` on is offered again, and counts then. */
  takeBack(request: EngineRequest, from: number): void {
    request.offers?.cut(from);
    request.offeredBlocks = Math.min(request.offeredBlocks, from);
  }

  /** The request lets its blocks go: what cannot be offered now will not be. */
  giveUp(request: EngineRequest): void {
    if (this.#writeDown && !request.prefillOnly) {
      this.#note(this.#writeDown, request);
      return;
    }
    const full = this.#fullBlocks(request);
    // Without a node only what was lost while there was one is skipped: it has been offered, and taken back.
    const end = this.#connector.attached ? full : Math.min(full, request.offers?.end ?? 0);
    this.#offer(request);
    this.#counts.skipped += Math.max(end - request.offeredBlocks, 0);
    request.offers?.putOffNoMore();
  }

  #store(
    hashes: Buffer,
    first: number,
    rows: readonly (readonly number[])[],
    blocks: readonly number[],
    letGo: () => void,
    offers: Offers,
    request?: EngineRequest,
  ): void {
    this.#held.hold(blocks);
    this.#unsentBlocks += blocks.length;
    let released = false;
    const onReleased = (): void => {
      invariant(!released, 'exports: the connector released the same blocks twice');
      released = true;
      this.#held.letGo(blocks);
      letGo();
      this.#onReleased();
    };
    const blockIds = Int32Array.from(rows.flat());
    const { epoch } = this.#connector;
    const blocksOf = (from: number, to: number): number =>
      rows.reduce((sum, row) => sum + blocksIn(row, from - first, to - first), 0);
    const offer = offers.begin(first, first + rows[0]!.length, blocksOf);
    const onSettled = (held: number, isBusy: boolean, isLost = false): void => {
      if (this.#isCut) {
        this.#isCut = false;
        this.#onReleased();
      }
      const heldEnd = first + held;
      // Behind one that was lost it may be our own that the node still writes, until it hears that nobody waited for that.
      const mayAgain = isLost || (isBusy && offer.round > 0);
      const answered = (): void => {
        const isAgain = mayAgain && request !== undefined && this.#again(request, offers, offer, heldEnd);
        offers.answered(offer, { heldEnd, isDropped: mayAgain ? !isAgain : !isBusy });
      };
      // No next step comes that it would be offered with, and what is lost at once would be lost at once again.
      const hasEnded = request?.state === 'finished' && !request.prefillOnly && !this.#isEnding;
      const pauseMs = mayAgain && hasEnded && heldEnd < offer.end ? offers.pauseMs(offer) : 0;
      if (pauseMs > 0) this.#after(pauseMs, answered);
      else answered();
      if (!request?.prefillOnly) return;
      request.prefillOnly.unsettled--;
      this.#onSettled?.(request, first, heldEnd, isBusy, epoch);
    };
    if (request?.prefillOnly) {
      request.prefillOnly.unsettled++;
      request.prefillOnly.epoch ??= epoch;
    }
    const options = { ...this.#tokensOf(request), onSettled };
    this.#unsent.push(() => this.#connector.store(hashes, first, blockIds, onReleased, options));
  }

  #after(pauseMs: number, call: () => void): void {
    this.#paused++;
    this.#clock.after(pauseMs, () => {
      this.#paused--;
      call();
    });
  }

  /**
   * What the link has lost of a request is offered again with its next block, for what lies behind it is found by nobody without it. False:
   * not again. Who computes for another worker offers again by itself (storing.ts).
   */
  #again(request: EngineRequest, offers: Offers, offer: Offer, from: number): boolean {
    if (from >= offer.end) return true; // has been taken back
    // It began anew, or will: what it has then is offered from its first block on, and counts for itself.
    const isLetGo = !request.holdsBlocks && request.state !== 'finished';
    if (request.prefillOnly || isLetGo || request.offers !== offers) return false;
    if (!offers.mayTakeBack(offer)) return false;
    if (!request.holdsBlocks) return this.#offerFound(request, offers, offer, from);
    offers.takeBack(offer, from);
    request.offeredBlocks = Math.min(request.offeredBlocks, from);
    return true;
  }

  /**
   * The request has ended, as one with a short answer has before a slow node says anything, and nobody offers its blocks before somebody hits
   * them: those that are found now, from the lost one on, are offered. False: none. As far as there is no room for them yet, what is still on
   * its way is left to be answered by itself: where it is lost, too, there is as much more room.
   */
  #offerFound(request: EngineRequest, offers: Offers, offer: Offer, from: number): boolean {
    if (this.#isEnding || !this.#connector.attached) return false;
    const hit = this.#kv.getComputedBlocks(request);
    const found = Math.min(Math.floor(hit.tokens / this.#kv.blockTokens), offers.openEnd);
    const tables = hit.blocks.map((table) => table.slice(from, found));
    const most = from + this.#columnsWithin(tables);
    const end = most < found ? offers.wholeEnd(from, most) : most;
    if (end <= from) return false;
    offers.takeBack(offer, from, end);
    this.#offerRows(request, offers, from, end, tables);
    this.#onReleased(); // else nobody sends it, where no step comes
    return true;
  }

  /** Where the names of its blocks depend on its tokens alone. */
  #tokensOf(request: EngineRequest | undefined): Pick<StoreOptions, 'tokens'> {
    if (!request?.description.isPlain) return {};
    const { blockTokens } = this.#kv;
    return { tokens: (from, to) => request.tokenIds(from * blockTokens, to * blockTokens) };
  }

  #note(writeDown: WriteDownAhead, request: EngineRequest): void {
    const first = request.offeredBlocks;
    const end = this.#fullBlocks(request);
    if (end <= first) return;
    request.offeredBlocks = end;
    writeDown.computed(request.hashes.packed, this.#kv.blockTables(request.id)[0]!, first, end);
  }

  /** Per group the full blocks from `first` on, null where no window reaches that a hit at their end looks at. */
  #tables(request: EngineRequest, first: number): number[][] {
    const { blockTokens } = this.#kv;
    const end = this.#fullBlocks(request);
    // The same prompt again is hit one block earlier when it fills its blocks: its last token is always computed.
    const again = Math.floor((request.promptTokens - 1) / blockTokens);
    const hitBlocks = again > first ? Math.min(again, end) : end;
    return this.#kv.blockTables(request.id).map((table, group) => {
      const behind = this.#kv.skippedBlocks(group, hitBlocks * blockTokens);
      return table.slice(first, end).map((block, i) => (first + i < behind ? nullBlock : block));
    });
  }

  get #storeRoom(): number {
    return (this.#connector.storeRoom ?? Number.POSITIVE_INFINITY) - this.#unsentBlocks;
  }

  /** How many leading columns of the tables there is room for: in exports for what is not held yet, and in the connector for all. */
  #columnsWithin(tables: GroupBlocks): number {
    const room = this.#maxBlocks - this.#held.count;
    const storeRoom = this.#storeRoom;
    const columns = tables[0]!.length;
    let blocks = 0;
    let inAll = 0;
    for (let i = 0; i < columns; i++) {
      for (const table of tables) {
        if (table[i] === nullBlock) continue;
        inAll++;
        if (!this.#held.has(table[i]!)) blocks++;
      }
      if (inAll > storeRoom) this.#isCut = true;
      if (blocks > room || inAll > storeRoom) return i;
    }
    return columns;
  }

  #fullBlocks(request: EngineRequest): number {
    return Math.floor(request.computedTokens / this.#kv.blockTokens);
  }
}

/** Of places `from`..`to`-1 of a row, those that are not null. */
function blocksIn(row: readonly number[], from: number, to: number): number {
  let blocks = 0;
  for (let i = from; i < Math.min(to, row.length); i++) if (row[i] !== nullBlock) blocks++;
  return blocks;
}

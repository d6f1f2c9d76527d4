/**
 * State-space layers: one block holds the state after some token, and a hit needs that single block. What is before is
 * never looked at again.
 *
 * In mode `align` a block per scheduling step is enough, so tables are sparse and the speculative blocks wander along:
 *
 *     null null null | state | spec spec       one step later:       null null null null | state | spec spec
 *
 * Invariant (align): a request that holds blocks ends with its running state and its speculative blocks.
 * After vLLM's MambaManager.
 */
import { invariant } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import type { MambaSpec } from './attention-spec.ts';
import { nullBlock } from './block-pool.ts';
import type { CacheRequest } from './request.ts';
import { tailsWorthCaching } from './retention.ts';
import {
  type Growth,
  type Hit,
  type HitQuery,
  type ManagerOptions,
  type PartialTailOffload,
  type Retention,
  SingleTypeManager,
} from './single-type-manager.ts';

export class MambaManager extends SingleTypeManager {
  readonly kind = 'mamba';
  readonly #aligned: boolean;
  readonly #speculative: number;
  /** Registered in this step: the state is not written yet, so nobody may start from it. */
  readonly #cachedThisStep = new Set<HashKey>();
  /** Requests whose table ends with a running state and speculative blocks (align). */
  readonly #running = new Set<string>();
  /** Where the state was before the last growth: the copy's source, let go one step later (align). */
  readonly #lastState = new Map<string, number>();
  /** Blocks that were registered for a prompt that ends inside them, by the request that goes on writing there. */
  readonly #promptTails = new Map<string, number>();
  /** Copies of prompt tails that were made in this step. */
  #tailOffloads: PartialTailOffload[] = [];

  constructor(options: ManagerOptions, spec: MambaSpec) {
    super(options);
    this.#aligned = spec.mode === 'align';
    this.#speculative = spec.speculativeBlocks;
  }

  /** Right to left, the last state that is held; with partial hits at any hash boundary. */
  findLongestCacheHit(query: HitQuery): Hit {
    const { hashes, groups, alignmentTokens } = query;
    const stride = Math.min(this.blockTokens, alignmentTokens);
    const { hashTokens } = this.options;
    const last = Math.min(query.maxTokens, hashes.blockCount * hashTokens);
    for (let tokens = last - (last % stride); tokens > 0; tokens -= stride) {
      if (tokens % alignmentTokens !== 0) continue;
      const found = this.pool.findAll(hashes, tokens / hashTokens - 1, groups);
      if (!found) continue;
      const before = this.blocksFor(tokens) - 1;
      return { columns: found.map((block) => [...new Array<number>(before).fill(nullBlock), block]), tokens };
    }
    return { columns: groups.map(() => []), tokens: 0 };
  }

  override blocksToAllocate(requestId: string, growth: Growth, computed: readonly number[], capped: boolean): number {
    const hash = computed.length > 0 ? this.pool.hashOf(computed.at(-1)!) : undefined;
    // More than there are: the request waits for the next step.
    if (hash !== undefined && this.#cachedThisStep.has(hash)) return this.pool.blockCount + 1;
    if (!this.#aligned) return super.blocksToAllocate(requestId, this.#withSpeculative(growth), computed, capped);
    let count = this.#alignedBlocks(growth) - computed.length - this.table(requestId).length;
    const endsInside = computed.length > 0 && growth.localTokens % this.blockTokens !== 0;
    if (count > 0) count = this.#running.has(requestId) ? 1 : 1 + this.#speculative;
    const copied = endsInside || this.#sharedTail(requestId) !== undefined;
    return Math.max(count, 0) + this.freeAmong(computed) + (copied ? 1 : 0);
  }

  /** After an external load its state has a block of its own, before the running one: the prediction knows of one. */
  override blocksBeyondDemand(requestId: string, growth: Growth): number {
    const external = growth.computedTokens > growth.localTokens;
    if (!this.#aligned || !external || this.tables.has(requestId)) return 0;
    return growth.mainModelTokens > this.blocksFor(growth.computedTokens) * this.blockTokens ? 1 : 0;
  }

  override allocateBlocks(requestId: string, growth: Growth): number[] {
    if (!this.#aligned) return super.allocateBlocks(requestId, this.#withSpeculative(growth));
    const table = this.tableFor(requestId);
    const { blocks } = table;
    const target = this.replacePartialHit(table);
    const first = target === undefined ? [] : [target];
    this.#leaveTail(requestId);
    const required = this.#alignedBlocks(growth);
    const held = blocks.length;
    if (required <= held) return first;
    const running = this.#running.has(requestId);
    if (running) this.#lastState.set(requestId, held - 1 - this.#speculative);
    else if (held > 0) this.#lastState.set(requestId, held - 1);

    const stateAt = required - this.#speculative - 1;
    while (blocks.length < stateAt) blocks.push(nullBlock);
    if (running) {
      // Speculative blocks that are overtaken move to the end instead of being freed and taken anew.
      for (let i = held - this.#speculative; i < Math.min(held, stateAt); i++) {
        blocks.push(blocks[i]!);
        blocks[i] = nullBlock;
      }
    }
    const fresh = required - blocks.length;
    invariant(fresh <= (running ? 1 : 1 + this.#speculative), () => `request ${requestId}: ${fresh} new state blocks`);
    blocks.push(...this.allocate(Math.max(fresh, 0)));
    this.#running.add(requestId);
    return [...first, ...blocks.slice(held)];
  }

  override cacheBlocks(request: CacheRequest, tokens: number, retention: Retention): void {
    const first = this.tableFor(request.id).cachedCount;
    super.cacheBlocks(request, tokens, retention);
    const table = this.tableFor(request.id);
    for (let i = first; i < table.cachedCount; i++) this.#noteCached(table.blocks[i]!);
    this.#cachePromptTail(request, tokens);
  }

  override blocksOfTokens(requestId: string): readonly number[] {
    return this.table(requestId);
  }

  override takeTailOffloads(): PartialTailOffload[] {
    const offloads = this.#tailOffloads;
    this.#tailOffloads = [];
    return offloads;
  }

  override removeSkippedBlocks(requestId: string, processedTokens: number): void {
    super.removeSkippedBlocks(requestId, processedTokens);
    const at = this.#lastState.get(requestId);
    if (at === undefined || at >= this.blocksFor(processedTokens) - 1) return;
    const { blocks } = this.tableFor(requestId);
    const block = blocks[at]!;
    if (block === nullBlock) return;
    this.pool.release([block]);
    blocks[at] = nullBlock;
  }

  override free(requestId: string): void {
    this.#running.delete(requestId);
    this.#lastState.delete(requestId);
    this.#promptTails.delete(requestId);
    super.free(requestId);
  }

  override newStepStarts(): void {
    this.#cachedThisStep.clear();
    this.#tailOffloads = [];
  }

  protected override skippedTokens(computedTokens: number): number {
    return computedTokens - 1;
  }

  protected override worthCaching(first: number, end: number, retention: Retention) {
    const { blockTokens } = this;
    const { alignmentTokens } = this.options;
    return tailsWorthCaching({ first, end, retention, blockTokens, alignmentTokens, tailBlocks: 1, shift: 0 });
  }

  /** A step that ends at the last hash boundary of the prompt, inside a block: this state is findable, too. */
  #cachePromptTail(request: CacheRequest, tokens: number): void {
    const { hashTokens, group, partialHits } = this.options;
    if (!this.#aligned || !partialHits || request.promptTokens === undefined) return;
    if (tokens !== request.promptTokens - (request.promptTokens % hashTokens)) return;
    if (tokens % this.blockTokens === 0) return;
    const block = this.table(request.id)[Math.floor(tokens / this.blockTokens)]!;
    this.pool.cachePartialBlock({ request, block, tokens, hashTokens, group, kind: this.kind });
    this.#promptTails.set(request.id, block);
    this.#noteCached(block);
  }

  /** The block of this request's prompt tail, while it is findable as such. */
  #sharedTail(requestId: string): number | undefined {
    const block = this.#promptTails.get(requestId);
    if (block === undefined || this.pool.hashTokensOf(block) % this.blockTokens === 0) return undefined;
    return block;
  }

  /**
   * The request goes on and overwrites the state that others may want: they get a copy of it. The table keeps the block,
   * because the running step may have its id already.
   */
  #leaveTail(requestId: string): void {
    const source = this.#sharedTail(requestId);
    this.#promptTails.delete(requestId);
    if (source === undefined) return;
    const target = this.pool.allocate(1)[0]!;
    const tokens = this.pool.hashTokensOf(source);
    this.pool.moveHashes(source, target);
    this.pool.touch([source]);
    this.addCopy(source, target);
    this.#tailOffloads.push({ requestId, group: this.options.group, block: target, tokens });
  }

  #noteCached(block: number): void {
    const hash = block === nullBlock ? undefined : this.pool.hashOf(block);
    if (hash !== undefined) this.#cachedThisStep.add(hash);
  }

  /** Drafted tokens have no states of their own: draft models have no such layers. */
  #alignedBlocks(growth: Growth): number {
    return this.blocksFor(growth.mainModelTokens) + this.#speculative;
  }

  #withSpeculative(growth: Growth): Growth {
    return { ...growth, tokens: growth.tokens + this.#speculative * this.blockTokens };
  }
}

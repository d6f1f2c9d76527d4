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
  readonly #promptTails = new Map<string, { readonly block: number; readonly tokens: number }>();
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
    const grown = this.#alignedBlocks(growth) - computed.length - this.table(requestId).length;
    const endsInside = computed.length > 0 && growth.localTokens % this.blockTokens !== 0;
    const copies = endsInside || this.#promptTails.has(requestId) ? 1 : 0;
    // vLLM adds the copy before it asks whether anything is needed: with one, the running state's block counts, needed or not.
    const isNeeded = grown > 0 || copies > 0;
    const fresh = isNeeded ? (this.#running.has(requestId) ? 1 : 1 + this.#speculative) + copies : grown;
    return fresh + this.freeAmong(computed);
  }

  /**
   * After an external load its state has a block of its own, before the running one: the prediction knows of one. And where a
   * table is longer than the request, drafted tokens having been refused, the prediction counts that as room for other groups.
   */
  override blocksBeyondDemand(requestId: string, growth: Growth): number {
    if (!this.#aligned) return 0;
    const held = this.tables.get(requestId)?.blocks.length;
    if (held !== undefined)
      return this.#promptTails.has(requestId) ? 0 : Math.max(held - this.#alignedBlocks(growth), 0);
    if (growth.computedTokens === growth.localTokens) return 0;
    return growth.mainModelTokens > this.blocksFor(growth.computedTokens) * this.blockTokens ? 1 : 0;
  }

  override allocateBlocks(requestId: string, growth: Growth): number[] {
    if (!this.#aligned) return super.allocateBlocks(requestId, this.#withSpeculative(growth));
    const table = this.tableFor(requestId);
    const { blocks } = table;
    const required = this.#alignedBlocks(growth);
    const held = blocks.length;
    const running = this.#running.has(requestId);
    const copies = table.partialHit !== undefined || this.#promptTails.has(requestId);
    const target = this.replacePartialHit(table);
    const first = target === undefined ? [] : [target];
    this.#leaveTail(requestId);
    this.#running.add(requestId);
    if (required <= held && !copies) return first;
    if (running) this.#lastState.set(requestId, held - 1 - this.#speculative);
    else if (held > 0) this.#lastState.set(requestId, held - 1);
    if (required <= held) return first;

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

  override pop(requestId: string): number[] {
    this.#forget(requestId);
    return super.pop(requestId);
  }

  override free(requestId: string): void {
    this.#forget(requestId);
    super.free(requestId);
  }

  #forget(requestId: string): void {
    this.#running.delete(requestId);
    this.#lastState.delete(requestId);
    this.#promptTails.delete(requestId);
    this.#tailOffloads = this.#tailOffloads.filter((offload) => offload.requestId !== requestId);
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
    if (block === nullBlock) return;
    this.#promptTails.set(request.id, { block, tokens });
    this.#noteCached(block);
  }

  /**
   * The request goes on and overwrites the state that others may want: they get a copy of it, which nobody may start from before
   * the step that makes it has run. The table keeps the block, because the running step may have its id already.
   */
  #leaveTail(requestId: string): void {
    const tail = this.#promptTails.get(requestId);
    this.#promptTails.delete(requestId);
    if (tail === undefined) return;
    const { block: source, tokens } = tail;
    const target = this.pool.allocate(1)[0]!;
    this.pool.moveHashes(source, target);
    this.#noteCached(target);
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

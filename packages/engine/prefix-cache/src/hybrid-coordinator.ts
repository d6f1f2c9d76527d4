/**
 * Several kinds of attention in one model: a prefix is a hit only where all of them have it. Full attention can cut its
 * hit anywhere; the others can only offer some ends. So the length goes round the groups, each one cutting it to an end
 * that it has, until a round cuts nothing more:
 *
 *     max ──full──▶ 28 ──window──▶ 24 ──state──▶ 16 ──full──▶ 16 ──window──▶ 16 ──state──▶ 16   done
 *
 * What the groups cache is cut to the same ends, or it could never be hit. After vLLM's HybridKVCacheCoordinator.
 */
import { invariant } from '@kvtier/errors';
import { type CacheHit, type ConnectorHit, Coordinator, type CoordinatorOptions } from './coordinator.ts';
import type { BlockHashes, CacheRequest } from './request.ts';
import type { SingleTypeManager } from './single-type-manager.ts';

/** Groups of one spec, looked up together. */
interface SpecGroup {
  readonly groups: readonly number[];
  readonly manager: SingleTypeManager;
  readonly wholePrefix: boolean;
  readonly isMamba: boolean;
  readonly useEagle: boolean;
}

export interface HybridOptions extends CoordinatorOptions {
  /** Per group: its spec as text (equal specs, equal text), and whether it sees the whole prefix. */
  readonly specs: readonly { readonly key: string; readonly wholePrefix: boolean }[];
  /** Hits end on multiples of this. */
  readonly schedulerTokens: number;
  readonly hashTokens: number;
  /** Hits may end inside a block. */
  readonly partialHits: boolean;
}

export class HybridCoordinator extends Coordinator {
  readonly #specGroups: readonly SpecGroup[];
  readonly #schedulerTokens: number;
  readonly #alignmentTokens: number;
  readonly #hashTokens: number;
  readonly #partialHits: boolean;

  constructor(options: HybridOptions) {
    super(options);
    this.#schedulerTokens = options.schedulerTokens;
    this.#hashTokens = options.hashTokens;
    this.#partialHits = options.partialHits;
    this.#alignmentTokens = options.partialHits ? options.hashTokens : options.schedulerTokens;
    const byKey = new Map<string, number[]>();
    options.specs.forEach(({ key }, group) => {
      byKey.set(key, [...(byKey.get(key) ?? []), group]);
    });
    this.#specGroups = [...byKey.values()]
      .map((groups) => ({
        groups,
        manager: this.managers[groups[0]!]!,
        wholePrefix: options.specs[groups[0]!]!.wholePrefix,
        isMamba: this.managers[groups[0]!]!.kind === 'mamba',
        useEagle: groups.some((group) => options.eagleGroups.has(group)),
      }))
      .sort((a, b) => Number(b.wholePrefix) - Number(a.wholePrefix));
  }

  findLongestCacheHit(hashes: BlockHashes, maxTokens: number): CacheHit {
    const found = new Map<SpecGroup, number[][]>();
    // A draft model's extra block is dropped once per group and length: again after somebody else cut the length.
    const dropped = new Set<SpecGroup>();
    let hit = maxTokens;
    let longest = 0;
    let wholePrefixTokens: number | undefined;
    const onePass =
      this.#specGroups.length === 2 && this.#specGroups[0]!.wholePrefix && !this.#specGroups[1]!.wholePrefix;
    for (;;) {
      let tokens = hit;
      for (const one of this.#specGroups) {
        if (one.wholePrefix && found.has(one) && wholePrefixTokens !== undefined) {
          tokens = Math.min(tokens, wholePrefixTokens);
          continue;
        }
        const dropEagleBlock = one.useEagle && !dropped.has(one);
        const margin = dropEagleBlock && !one.isMamba ? this.#marginOf(one) : 0;
        const result = one.manager.findLongestCacheHit({
          hashes,
          maxTokens: Math.min(tokens + margin, maxTokens),
          groups: one.groups,
          dropEagleBlock,
          alignmentTokens: this.#alignmentTokens,
        });
        if (dropEagleBlock) dropped.add(one);
        else if (result.tokens < tokens) dropped.clear();
        found.set(one, result.columns);
        tokens = result.tokens;
        longest = Math.max(longest, tokens);
        if (one.wholePrefix) wholePrefixTokens = tokens;
      }
      if (tokens >= hit) break;
      hit = tokens;
      if (onePass) break;
    }
    return { blocks: this.#blocksOf(found, hit), tokens: hit, sharedPrefixBoundary: longest > hit ? longest : 0 };
  }

  override findHitForConnector(hashes: BlockHashes, maxTokens: number): ConnectorHit {
    const reconciled = (): ConnectorHit => ({ ...this.findLongestCacheHit(hashes, maxTokens), diverged: false });
    const whole = this.#specGroups[0]!;
    if (!whole.wholePrefix || !this.#specGroups.some(({ isMamba }) => isMamba)) return reconciled();
    const found = new Map<SpecGroup, number[][]>();
    let tokens = 0;
    let least = Infinity;
    for (const one of this.#specGroups) {
      const result = one.manager.findLongestCacheHit({
        hashes,
        maxTokens,
        groups: one.groups,
        dropEagleBlock: one.useEagle,
        alignmentTokens: this.#alignmentTokens,
      });
      if (one === whole) tokens = result.tokens;
      // Deeper than full attention: all of them have to agree on an end.
      if (result.tokens > tokens) return reconciled();
      least = Math.min(least, result.tokens);
      found.set(one, result.columns);
    }
    return { blocks: this.#blocksOf(found, tokens), tokens, sharedPrefixBoundary: 0, diverged: least < tokens };
  }

  cacheBlocks(request: CacheRequest, tokens: number): void {
    const finalTokens = Math.max(tokens - this.options.reprefillableTokens, 0);
    const aligned = this.#partialHits ? finalTokens : finalTokens - (finalTokens % this.#schedulerTokens);
    const retention = this.retentionFor(request);
    this.managers.forEach((manager, group) => {
      const extra = this.options.eagleGroups.has(group) ? manager.blockTokens : 0;
      manager.cacheBlocks(request, Math.min(finalTokens, aligned + extra), retention);
    });
  }

  #marginOf(one: SpecGroup): number {
    return this.#partialHits ? this.#hashTokens : one.manager.blockTokens;
  }

  #blocksOf(found: ReadonlyMap<SpecGroup, number[][]>, tokens: number): number[][] {
    const blocks: number[][] = this.managers.map(() => []);
    for (const [one, columns] of found) {
      one.groups.forEach((group, at) => {
        const column = columns[at]!;
        const count = Math.ceil(tokens / one.manager.blockTokens);
        // Only a whole prefix may be longer than what was agreed on: every other kind ends where the last round did.
        invariant(one.wholePrefix || column.length <= count, () => `group ${group}: a hit past the common end`);
        column.length = Math.min(column.length, count);
        blocks[group] = column;
      });
    }
    return blocks;
  }
}

/**
 * What of the index counts for one worker. A prompt's block is at hand where all attention groups have what they need of it: groups that see
 * everything need the whole prefix, groups with a window only the last blocks before its end. With several data-parallel ranks
 * nobody knows which one will get the request: the one that holds least counts.
 */
import { maxMedia } from '../clears.ts';
import type { Keys, KvIndex, Match } from '../kv-index.ts';
import type { Target } from '../targets.ts';
import { mediumNumbers } from './media.ts';

export interface GroupView extends Target {
  /** Blocks before the end that it needs; undefined: all. */
  readonly windowBlocks: number | undefined;
}

/** By rank, each rank's groups; at least one of each. */
export type WorkerView = readonly (readonly GroupView[])[];

/**
 * Look-ups of one prompt in vain, for the windows of all workers together: they are made in one turn. Whoever has used up its part of them has
 * nothing, but a first end of the prompt is tried for everybody.
 */
export const mostLooks = 32_768;

/** What the views of one prompt share. */
export class WindowLooks {
  readonly #index: KvIndex;
  readonly #keys: Keys;
  #left = mostLooks;
  /** Of the view that is asked now. */
  #own = 0;
  #views: number;
  #end: number | undefined;

  /** `views`: so many will be asked. What one does not use is for those after it. */
  constructor(index: KvIndex, keys: Keys, views: number) {
    this.#index = index;
    this.#keys = keys;
    this.#views = views;
  }

  /** The next view is asked. */
  next(): void {
    this.#left += this.#own;
    this.#own = Math.floor(this.#left / Math.max(1, this.#views--));
    this.#left -= this.#own;
  }

  /** Whether there are more after these. */
  take(looks: number): boolean {
    this.#own -= looks;
    return this.#own > 0;
  }

  /** Behind so many blocks nobody has any: looked for once, not by each of those who compute a new prompt's blocks anew. */
  get end(): number {
    this.#end ??= this.#index.endOfHeld(this.#keys);
    return this.#end;
  }
}

/** Almost all workers: one rank, one group that sees everything. */
export const plainTarget = (view: WorkerView): Target | undefined =>
  view.length === 1 && view[0]!.length === 1 && view[0]![0]!.windowBlocks === undefined ? view[0]![0] : undefined;

/** `looks`: of all that are asked of this prompt. */
export function matchView(
  index: KvIndex,
  keys: Keys,
  view: WorkerView,
  looks = new WindowLooks(index, keys, 1),
): Match {
  looks.next();
  const matches = view.map((groups) => matchGroups(index, keys, groups, looks));
  return matches.reduce((least, match) => (match.blocks < least.blocks ? match : least));
}

function matchGroups(index: KvIndex, keys: Keys, groups: readonly GroupView[], looks: WindowLooks): Match {
  const whole = groups.filter(({ windowBlocks }) => windowBlocks === undefined);
  const windows = groups.filter(({ windowBlocks }) => windowBlocks !== undefined);
  let blocks = whole.length > 0 ? keys.length / 2 : looks.end;
  for (const { blocks: held } of index.match(keys, whole)) blocks = Math.min(blocks, held);
  /** The window that was short last is looked at first: it mostly is so again. */
  let first = 0;
  while (blocks > 0) {
    let looked = 0;
    let held = 0;
    let took = 0;
    let isShort = false;
    for (; !isShort && looked < windows.length; looked++) {
      const group = windows[(first + looked) % windows.length]!;
      const needed = Math.min(group.windowBlocks!, blocks);
      held = index.heldBefore(keys, blocks, needed, group);
      isShort = held < needed;
      took += isShort ? held + 1 : held;
    }
    if (!isShort) break; // no more than its windows, whoever else is asked
    const isMore = looks.take(took);
    first = (first + looked - 1) % windows.length;
    // Every end behind the missing block needs it, up to the end of its window.
    blocks = isMore ? blocks - held - 1 : 0;
  }
  if (whole.length > 0) return index.match(keys.subarray(0, 2 * blocks), whole)[0]!;
  const byMedium = new Int32Array(maxMedia);
  byMedium[mediumNumbers.gpu] = blocks;
  return { blocks, byMedium };
}

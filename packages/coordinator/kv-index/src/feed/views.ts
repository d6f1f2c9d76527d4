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

/** Most prefixes that are tried one after another to find one whose windows are whole. */
const maxTries = 256;

/** Almost all workers: one rank, one group that sees everything. */
export const plainTarget = (view: WorkerView): Target | undefined =>
  view.length === 1 && view[0]!.length === 1 && view[0]![0]!.windowBlocks === undefined ? view[0]![0] : undefined;

export function matchView(index: KvIndex, keys: Keys, view: WorkerView): Match {
  const matches = view.map((groups) => matchGroups(index, keys, groups));
  return matches.reduce((least, match) => (match.blocks < least.blocks ? match : least));
}

function matchGroups(index: KvIndex, keys: Keys, groups: readonly GroupView[]): Match {
  const whole = groups.filter(({ windowBlocks }) => windowBlocks === undefined);
  const windows = groups.filter(({ windowBlocks }) => windowBlocks !== undefined);
  let blocks = keys.length / 2;
  for (const { blocks: held } of index.match(keys, whole)) blocks = Math.min(blocks, held);
  for (let tries = 0; blocks > 0; tries++) {
    const short = windows
      .map((group) => ({ group, needed: Math.min(group.windowBlocks!, blocks) }))
      .map(({ group, needed }) => ({ held: index.heldBefore(keys, blocks, needed, group), needed }))
      .find(({ held, needed }) => held < needed);
    if (short === undefined) break;
    // Every end behind the missing block needs it, up to the end of its window.
    blocks = tries < maxTries ? blocks - short.held - 1 : 0;
  }
  if (whole.length > 0) return index.match(keys.subarray(0, 2 * blocks), whole)[0]!;
  const byMedium = new Int32Array(maxMedia);
  byMedium[mediumNumbers.gpu] = blocks;
  return { blocks, byMedium };
}

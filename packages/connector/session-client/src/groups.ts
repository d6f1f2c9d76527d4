/**
 * Attention groups as the tier sees them. Each group's blocks live in a namespace of their own, so each has a session,
 * and its own answer to a lookup; a prefix can be loaded where all groups have what a token after it looks at:
 *
 *     full      ■ ■ ■ ■ ■ ■ ■ ·          all blocks of the prefix
 *     window    · · ■ ■ · ■ ■ ■          the last two of them: prefixes of 4 and 7 blocks can be loaded
 *
 * In block ids that go to a load or a store, row-major [group][block], 0 (the null block) stands for what a group does
 * not need: always at the front of its row. Pure.
 */
import { invariant } from '@kvtier/errors';
import type { KvLayout } from '@kvtier/executor';
import type { Hit, LoadChoice } from '@kvtier/load-planner';

/** Per group, the blocks before the end of a prefix that a token after it looks at; Infinity: all. */
export function groupWindows({ groups, blockTokens }: KvLayout): number[] {
  if (!groups) return [Number.POSITIVE_INFINITY];
  return groups.map(({ windowTokens }) =>
    windowTokens === 0 ? Number.POSITIVE_INFINITY : Math.ceil((windowTokens - 1) / blockTokens),
  );
}

/** A group's share of a load or a store. */
export interface GroupPart {
  readonly group: number;
  /** Blocks of the row before the first one that is wanted. */
  readonly from: number;
  readonly blockIds: Int32Array;
}

/** The rows of `blockIds`, cut to their first `count` blocks, without their null blocks; groups without any are left out. */
export function partsOf(blockIds: Int32Array, groups: number, count = blockIds.length / groups): GroupPart[] {
  const columns = blockIds.length / groups;
  invariant(Number.isInteger(columns), () => `connector: ${blockIds.length} block ids for ${groups} groups`);
  const parts: GroupPart[] = [];
  for (let group = 0; group < groups; group++) {
    const row = blockIds.subarray(group * columns, group * columns + count);
    let from = 0;
    while (from < count && row[from] === 0) from++;
    invariant(row.indexOf(0, from) < 0, () => `connector: group ${group} has a null block behind one that is wanted`);
    if (from < count) parts.push({ group, from, blockIds: row.slice(from) });
  }
  return parts;
}

/** How many leading columns of the rows hold at most `room` blocks together. */
export function columnsWithin(blockIds: Int32Array, groups: number, room: number): number {
  const columns = blockIds.length / groups;
  let blocks = 0;
  for (let i = 0; i < columns; i++) {
    for (let group = 0; group < groups; group++) if (blockIds[group * columns + i] !== 0) blocks++;
    if (blocks > room) return i;
  }
  return columns;
}

/** One group's hit, laid out per block. */
interface Laid {
  readonly window: number;
  readonly length: number;
  /** Held blocks in a row that end at each block. */
  readonly runs: Uint32Array;
  /** Blocks before each place that are held, but not in the arena. */
  readonly away: Uint32Array;
  readonly bringUs: number;
}

function layOut({ spans, estimatedUs }: Hit, window: number): Laid {
  const length = spans.reduce((sum, { count }) => sum + count, 0);
  const runs = new Uint32Array(length);
  const away = new Uint32Array(length + 1);
  let at = 0;
  for (const { tier, count } of spans) {
    for (let i = 0; i < count; i++, at++) {
      runs[at] = tier === '' ? 0 : 1 + (at > 0 ? runs[at - 1]! : 0);
      away[at + 1] = away[at]! + (tier === '' || tier === 'arena' ? 0 : 1);
    }
  }
  return { window, length, runs, away, bringUs: away[length]! === 0 ? 0 : estimatedUs / away[length]! };
}

/**
 * Every prefix that all groups can bring, shortest first, in blocks beyond the first `from` of the hits: those the engine
 * holds itself, with their windows.
 */
export function commonPrefixes(hits: readonly Hit[], windows: readonly number[], from: number): LoadChoice[] {
  const laid = hits.map((hit, group) => layOut(hit, windows[group]!));
  const longest = Math.min(...laid.map(({ length }) => length));
  const out: LoadChoice[] = [];
  for (let end = from + 1; end <= longest; end++) {
    let copies = 0;
    let bringUs = 0;
    const good = laid.every(({ window, runs, away, bringUs: eachUs }) => {
      const needed = Math.min(window, end - from);
      copies += needed;
      bringUs += eachUs * (away[end]! - away[end - needed]!);
      return runs[end - 1]! >= needed;
    });
    if (good) out.push({ blocks: end - from, copies, bringUs });
  }
  return out;
}

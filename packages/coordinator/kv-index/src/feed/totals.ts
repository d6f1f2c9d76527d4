/**
 * What a feed counts and metrics show as counters: they must never go back, so what is over (a subscription, a publisher that was
 * followed, a feed) leaves its counts to whoever goes on.
 */
import { type LieKind, lieKinds } from './lies.ts';

export const breakKinds = ['gaps', 'restarts', 'snapshots', 'reconnects'] as const;
/** Gaps, restarts and snapshots of event streams; connections made anew as the one before brought nothing of what was said. */
export type Breaks = Record<(typeof breakKinds)[number], number>;

export const noBreaks = (): Breaks => ({ gaps: 0, restarts: 0, snapshots: 0, reconnects: 0 });

export function addBreaks(sum: Breaks, more: Readonly<Breaks>): void {
  for (const kind of breakKinds) sum[kind] += more[kind];
}

export interface FeedTotals {
  /** Blocks forgotten for want of space, those included for whose names there was none. */
  readonly droppedBlocks: number;
  /** Of nodes beside engines that hash otherwise: blocks that were told of, and are credited to nobody, as their tokens were not known then. */
  readonly unnamedBlocks: number;
  readonly lies: Readonly<Record<LieKind, number>>;
  readonly breaks: Readonly<Breaks>;
}

export function sumOf(all: readonly FeedTotals[]): FeedTotals {
  const lies = Object.fromEntries(lieKinds.map((kind) => [kind, 0])) as Record<LieKind, number>;
  const breaks = noBreaks();
  let droppedBlocks = 0;
  let unnamedBlocks = 0;
  for (const one of all) {
    for (const kind of lieKinds) lies[kind] += one.lies[kind];
    addBreaks(breaks, one.breaks);
    droppedBlocks += one.droppedBlocks;
    unnamedBlocks += one.unnamedBlocks;
  }
  return { droppedBlocks, unnamedBlocks, lies, breaks };
}

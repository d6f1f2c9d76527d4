/**
 * Who holds which block in a cluster: the router's index, fed by block events. Beside index, matches and runs: lies about order
 * (`folds.ts`), sets of sources (`source-sets.ts`, `set-rows.ts`, `clears.ts`). What follows the events is in `feed`: how late they are
 * (`feed/event-delay.ts`), several engines behind one address (`feed/engine-streams.ts`), what could not be read (`feed/unread.ts`), what
 * is dealt with in one turn (`feed/slices.ts`), keys that are renewed (`feed/keyed-subscription.ts`).
 */

export { maxMedia } from './clears.ts';
export type { FollowedWorker } from './feed/followed.ts';
export type { Subscribe, Subscription } from './feed/followed-stream.ts';
export {
  type FeedMatch,
  type FeedMember,
  type FeedState,
  IndexFeed,
  type IndexFeedOptions,
} from './feed/index-feed.ts';
export { mediumNumbers } from './feed/media.ts';
export { feedMetrics } from './feed/metrics.ts';
export { type FeedTotals, sumOf } from './feed/totals.ts';
export { foldsOf, keepFolds } from './folds.ts';
export type { Keys } from './keys.ts';
export { keysOfHashes } from './keys.ts';
export {
  KvIndex,
  type KvIndexOptions,
  type KvIndexStats,
  type Match,
  type Parent,
} from './kv-index.ts';

export { type Target, Targets } from './targets.ts';

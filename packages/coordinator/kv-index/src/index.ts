/** Who holds which block in a cluster: the router's index, fed by block events. */

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

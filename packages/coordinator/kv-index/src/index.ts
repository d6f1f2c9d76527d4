/** Who holds which block in a cluster: the router's index, fed by block events. */
export type { Keys } from './chains.ts';
export {
  KvIndex,
  type KvIndexOptions,
  type KvIndexStats,
  type Match,
  type Parent,
  type Target,
} from './kv-index.ts';
export { maxMedia } from './source-sets.ts';

/** A cache node, put together. */
export { cacheNodeChecks } from './checks.ts';
export { type CacheNode, type CacheNodeOptions, openCacheNode } from './node.ts';
export { optionsOf } from './options-of.ts';

/** A cache node, put together. */
export { type CacheNode, type CacheNodeOptions, openCacheNode } from './node.ts';

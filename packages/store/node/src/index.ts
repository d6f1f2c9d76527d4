/**
 * A cache node, put together: `node.ts` from what `options-of.ts` makes of a configuration; `checks.ts` of `--check`. Its arena's file, and
 * what becomes of the file's pages: `arena-file.ts`, `page-watch.ts`; what it tells as KV events: `node-events.ts`, `gathered-changes.ts`.
 */
export { cacheNodeChecks } from './checks.ts';
export { type CacheNode, type CacheNodeOptions, openCacheNode } from './node.ts';
export { optionsOf } from './options-of.ts';

export { defaultSessionLimits, type SessionLimits } from './limits.ts';
export { type CacheNode, type CacheNodeOptions, openCacheNode } from './node.ts';
export { SessionServer, type SessionServerOptions } from './server.ts';

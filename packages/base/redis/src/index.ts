/**
 * The way to Redis servers, for all that keeps something there: the tier, the list of a cluster's members. Fail-overs are told by
 * `failover-news.ts`; passwords and certificates that are renewed: `renewed-login.ts`.
 */
export { checkRedisServers } from './check.ts';
export { asRedisError, RedisClient, type RedisScript } from './client.ts';
export type { RedisAddress, RedisLogin, RedisServers } from './servers.ts';

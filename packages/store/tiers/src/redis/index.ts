/** The Redis tier. */
export { checkRedis } from './check.ts';
export { RedisTier } from './redis-tier.ts';
export {
  defaultSettings as defaultRedisSettings,
  type RedisSettings,
  type RedisTierOptions,
} from './settings.ts';

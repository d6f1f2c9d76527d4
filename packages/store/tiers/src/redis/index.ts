/** The Redis tier. */
export { RedisTier } from './redis-tier.ts';
export {
  defaultSettings as defaultRedisSettings,
  type RedisSettings,
  type RedisTierOptions,
} from './settings.ts';

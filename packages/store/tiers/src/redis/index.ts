/** The Redis tier: `scripts.ts` run at the server; what is believed of it: `replies.ts`; who else uses it: `other-users.ts`. */
export { checkRedis } from './check.ts';
export { RedisTier } from './redis-tier.ts';
export {
  defaultSettings as defaultRedisSettings,
  type RedisSettings,
  type RedisTierOptions,
} from './settings.ts';

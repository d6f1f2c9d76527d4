/** What can be told of the tier's configuration before any server is asked. */
import { checkRedisServers } from '@kvtier/redis';
import { defaultSettings, type RedisSettings } from './settings.ts';

/** @throws KvError CONFIG what the tier would be refused for */
export const checkRedis = (settings: RedisSettings): void => checkRedisServers({ ...defaultSettings, ...settings });

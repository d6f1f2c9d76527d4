/** What can be told of a configuration before any server is asked. */
import { RenewedLogin } from './renewed-login.ts';
import { parseServers, type RedisServers } from './servers.ts';

/** @throws KvError CONFIG what a client would be refused for: its servers, a file that cannot be used */
export function checkRedisServers(settings: RedisServers): void {
  new RenewedLogin(settings, parseServers(settings)[0]!, () => {}).close();
}

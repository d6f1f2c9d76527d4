/** Where a list of members is, as far as it can be told before any server is asked. */
import type { MemberServers } from '@kvtier/config';
import { checkRedisServers } from '@kvtier/redis';

/** `place`: of the servers in the configuration. @throws KvError CONFIG what a member would be refused for */
export const checkList = (servers: MemberServers, place: string): void => checkRedisServers({ ...servers, place });

/** What is wrong with a configuration before any server is asked. */
import { expect, it } from 'vitest';
import { checkRedisServers } from './check.ts';

const checked = (server: string): unknown =>
  checkRedisServers({ mode: 'single', servers: [server], database: 0, timeLimitMs: 1_000 });

it.each(['redis://:pa%ss@h:1', 'redis://:100%@h:1', 'redis://a%b:x@h:1'])('%s is refused', (server) => {
  const line =
    'redis: redis://h:1 has a % in its user or password that must be written %25; write redis://host:port, rediss://host:port or unix:/path';
  expect(() => checked(server)).toThrow(expect.objectContaining({ code: 'CONFIG', message: line }));
});

it('and one that is written as it must be is none', () => {
  expect(() => checked('redis://a%25b:100%25@h:1')).not.toThrow();
});

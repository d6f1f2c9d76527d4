import { expect, it } from 'vitest';
import { parseConfig } from './index.ts';
import { redisSchema } from './redis.ts';

const least = { servers: ['redis://127.0.0.1:6379'], bytes: 1 << 30 };
const parsed = (value: object) => () => parseConfig(redisSchema, value, 'test');

it('needs servers and a budget; the rest has defaults', () => {
  expect(parsed(least)()).toEqual({
    ...{ mode: 'single', servers: ['redis://127.0.0.1:6379'], database: 0, bytes: 1 << 30, keyPrefix: 'kvtier:' },
    ...{ partBytes: 1_048_512, connections: 2, depth: 3, timeLimitMs: 2000, reloadMs: 10_000, policies: {} },
  });
});

it.each([
  ['an unknown key', { ...least, size: 1 }, 'test: top level: unknown key "size"; correct it and start again'],
  ['a URL of another scheme', { ...least, servers: ['http://a:1'] }, /servers\.0: write redis:\/\/host:port/],
  ['a URL with a query', { ...least, servers: ['redis://a:1?db=3'] }, /servers\.0: is followed by \? or #/],
  ['a URL with a fragment', { ...least, servers: ['unix:/run/a#b'] }, /servers\.0: is followed by \? or #/],
  [
    'a bare % in a path',
    { ...least, servers: ['unix:/run/100%'] },
    /servers\.0: has a % in its path that must be written %25/,
  ],
  ['no server', { ...least, servers: [] }, /servers: /],
  ['a budget that holds nothing', { ...least, bytes: 1000 }, /bytes: /],
  ['Sentinels without a name', { ...least, mode: 'sentinel' }, /masterName: mode sentinel needs/],
  ['two passwords', { ...least, password: 'a', passwordFile: '/b' }, /passwordFile: give password or/],
  ['a prefix with braces', { ...least, keyPrefix: '{a}' }, /keyPrefix: use 1 to 64/],
  ['a share above the whole', { ...least, policies: { default: { maxShare: 2 } } }, /policies\.default\.maxShare/],
  ['a policy for no namespace', { ...least, policies: { team: {} } }, /policies\.team/],
])('refuses %s', (_, value, message) => expect(parsed(value)).toThrow(message));

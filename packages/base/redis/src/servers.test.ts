/** What is wrong with a configuration before any server is asked. */
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ownCertificate } from '@kvtier/config/testing';
import { expect, it, onTestFinished } from 'vitest';
import { checkRedisServers } from './check.ts';
import { parseServers } from './servers.ts';

const forms = 'write redis://host:port, rediss://host:port or unix:/path';
const checked = (server: string): unknown =>
  checkRedisServers({ mode: 'single', servers: [server], database: 0, timeLimitMs: 1_000 });

it.each(['redis://:pa%ss@h:1', 'redis://:100%@h:1', 'redis://a%b:x@h:1'])('%s is refused', (server) => {
  const line = `redis: redis://h:1 has a % in its user or password that must be written %25; ${forms}`;
  expect(() => checked(server)).toThrow(expect.objectContaining({ code: 'CONFIG', message: line }));
});

it('and one that is written as it must be is none', () => {
  expect(() => checked('redis://a%25b:100%25@h:1')).not.toThrow();
});

it.each([
  ['redis://h:1?db=3', 'redis://h:1'],
  ['redis://u:pass@h:1?password=word', 'redis://h:1'],
  ['rediss://h:1/?a#b', 'rediss://h:1/'],
  ['redis://h:1#3', 'redis://h:1'],
  ['unix:/run/a?b', 'unix:/run/a'],
])('what follows a ? or # in %s is not dropped without a word', (server, told) => {
  const line = `redis: ${told} is followed by ? or # (the database has an option of its own; in a password or a path write %3F and %23); ${forms}`;
  expect(() => checked(server)).toThrow(expect.objectContaining({ code: 'CONFIG', message: line }));
});

it.each([
  ['unix:/run/my redis/größe.sock', '/run/my redis/größe.sock'],
  ['unix:/run/a%20b%3Fc%25.sock', '/run/a b?c%.sock'],
])('%s is the socket of that path', (server, path) => {
  const settings = { mode: 'single', servers: [server], database: 0, timeLimitMs: 1_000 } as const;
  expect(parseServers(settings)).toMatchObject([{ path }]);
});

it('a % in the path of a socket that stands for nothing is refused', () => {
  const line = `redis: unix:/run/100%.sock has a % in its path that must be written %25; ${forms}`;
  expect(() => checked('unix:/run/100%.sock')).toThrow(expect.objectContaining({ code: 'CONFIG', message: line }));
});

it('a private key that others may read is refused, as everywhere; a password that Docker mounts for all is taken', () => {
  const dir = mkdtempSync(join(tmpdir(), 'kvtier-redis-'));
  onTestFinished(() => rmSync(dir, { recursive: true }));
  ownCertificate(dir, 'own');
  const [certFile, keyFile, passwordFile] = ['own.pem', 'own.key', 'password'].map((name) => join(dir, name));
  writeFileSync(passwordFile!, 'word', { mode: 0o444 });
  const servers = { mode: 'single', servers: ['rediss://h:1'], database: 0, timeLimitMs: 1_000 } as const;
  const check = (): void => checkRedisServers({ ...servers, passwordFile, tls: { certFile, keyFile } });
  chmodSync(keyFile!, 0o644);
  const line = `redis.tls.keyFile: ${keyFile}: cannot be used (others may read it; chmod o-rwx it); name a readable PEM file`;
  expect(check).toThrow(expect.objectContaining({ code: 'CONFIG', message: line }));
  chmodSync(keyFile!, 0o640);
  expect(check).not.toThrow();
});

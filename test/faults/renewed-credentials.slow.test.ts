/**
 * Passwords, secret keys and authorities that are changed under a tier, on real servers: what the files hold is in use without a restart, also
 * where the one before has been revoked; a file that is of no use is told once and changes nothing.
 */
import { copyFileSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Tier } from '@kvtier/tiers';
import { openTier } from '@kvtier/tiers/redis/testing';
import { Bucket, openS3 } from '@kvtier/tiers/s3/testing';
import { hashNamed, namespaceNamed, TestBench } from '@kvtier/tiers/testing';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { aclRules, makeCertificate, RedisServer, startCluster } from '../../infra/redis/servers.ts';
import { S3Server, s3Credentials } from '../../infra/s3/servers.ts';

const payloadBytes = 20_000;
const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const limit = { timeout: 40_000, interval: 20 };
const reloadMs = 20;

let bench: TestBench;
let folder: string;
let told: (string | undefined)[];
const onProblem = (why: string | undefined): void => void told.push(why);
const ends: (() => unknown)[] = [];
beforeEach(() => {
  bench = new TestBench();
  folder = mkdtempSync(join(tmpdir(), 'kvtier-renewed-'));
  told = [];
});
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
  bench.dispose();
  rmSync(folder, { recursive: true });
});

const inFolder = (name: string): string => join(folder, name);
/** Written beside the old one and renamed, as Kubernetes does. */
function replace(name: string, text: string): void {
  writeFileSync(inFolder('fresh'), text);
  renameSync(inFolder('fresh'), inFolder(name));
}
const isIn = (tier: Tier): Promise<void> => vi.waitFor(() => expect(tier.stats().inService).toBe(true), limit);
const isOut = (tier: Tier): Promise<void> => vi.waitFor(() => expect(tier.stats().inService).toBe(false), limit);
const reads = async (tier: Tier): Promise<void> =>
  expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
const writes = async (tier: Tier): Promise<void> =>
  expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
function kept<T extends { close(): Promise<void> }>(tier: T): T {
  ends.push(() => tier.close());
  return tier;
}

/** A file that is none, then the right one: the first is told, and what follows says when the second is in use. */
async function renew(name: string, good: string): Promise<void> {
  told = [];
  replace(name, '\n');
  await vi.waitFor(() => expect(told.length).toBe(1), limit);
  expect(told[0]).toMatch(/: not read again \(.*\); the one before stays in use$/);
  expect(told[0]).not.toContain(good);
  replace(name, good);
  await vi.waitFor(() => expect(told.slice(1)).toEqual([undefined]), limit);
}

describe('Redis', () => {
  const login = { username: 'kvtier', reloadMs, timeLimitMs: 1_000 };
  const passwordFile = (): string => inFolder('password');
  const acl = (servers: readonly RedisServer[], ...rules: string[]) =>
    Promise.all(servers.map((server) => server.cli('acl', 'setuser', 'kvtier', ...rules)));
  const cut = (servers: readonly RedisServer[]) =>
    Promise.all(servers.map((server) => server.cli('client', 'kill', 'user', 'kvtier')));

  it.each(['single', 'cluster'] as const)(
    'a password that is renewed, then revoked (%s): what stands stays, what is cut comes back with the new one',
    async (mode) => {
      let servers: readonly RedisServer[];
      if (mode === 'single') {
        const server = await RedisServer.start();
        ends.push(() => server.stop());
        servers = [server];
      } else {
        const cluster = await startCluster(3, 0);
        ends.push(() => cluster.stop());
        servers = cluster.servers;
      }
      await acl(servers, 'on', '>first', ...aclRules('kvtier:').split(' '));
      replace('password', 'first\n');
      const urls = servers.map(({ url }) => url);
      const settings = { mode, servers: urls, ...login, passwordFile: passwordFile(), onProblem };
      const tier = kept(await openTier(bench, { ...settings, bytes: 8 << 20 }));
      await writes(tier);

      await acl(servers, '>second');
      await renew('password', 'second\n');
      await acl(servers, '<first');
      await reads(tier);
      expect(tier.stats().detail?.connections_lost).toBe(0);
      // Watched from before: it may be back from the first server's cut before the last one is told.
      let outs = 0;
      const unfollow = tier.follow(({ kind }) => void (kind === 'cleared' && outs++));
      await cut(servers);
      await vi.waitFor(() => expect(outs).toBeGreaterThan(0), limit);
      unfollow();
      await isIn(tier);
      await reads(tier);

      // Revoked before the file is new: out, and back with the file.
      await acl(servers, '>third', '<second');
      await cut(servers);
      await isOut(tier);
      replace('password', 'third');
      await isIn(tier);
      await reads(tier);
    },
    120_000,
  );

  it('a certificate of another authority: trusted as soon as the file says so', async () => {
    const tls = makeCertificate(folder);
    const server = await RedisServer.start({ tls });
    ends.push(() => server.stop());
    const caFile = inFolder('ca.pem');
    copyFileSync(tls.certFile, caFile);
    const common = { servers: [server.url.replace('127.0.0.1', 'localhost')], tls: { caFile } };
    const tier = kept(await openTier(bench, { ...common, reloadMs, timeLimitMs: 1_000, onProblem }));
    await writes(tier);
    await server.kill();
    await isOut(tier);
    makeCertificate(folder);
    await server.start();
    const refused = /certificate/;
    await vi.waitFor(() => expect(tier.stats().outOfServiceReason).toMatch(refused), limit);
    copyFileSync(tls.certFile, inFolder('fresh.pem'));
    renameSync(inFolder('fresh.pem'), caFile);
    await isIn(tier);
    await writes(tier);
    await reads(tier);
  }, 120_000);
});

it('S3: a secret key that is another one, at the server first; both of a pair', async () => {
  const server = await S3Server.start();
  ends.push(() => server.stop());
  const bucket = await Bucket.make(server.url, 'renewed');
  replace('secret', `${s3Credentials.secretAccessKey}\n`);
  const settings = {
    ...{ endpoint: server.url, bucket: bucket.name, refreshMs: 100, timeLimitMs: 3_000, idleLimitMs: 1_000 },
    ...{ secretAccessKey: undefined, secretAccessKeyFile: inFolder('secret'), reloadMs, onProblem },
  };
  const tier = kept(await openS3(bench, settings));
  await writes(tier);
  await server.setSecret('another-secret');
  await isOut(tier);
  await renew('secret', 'another-secret');
  await isIn(tier);
  await reads(tier);

  // Both of a pair, the new one before the old one is revoked: no request fails.
  const pair = (accessKeyId: string, secretAccessKey: string): string =>
    `[kv]\naws_access_key_id = ${accessKeyId}\naws_secret_access_key = ${secretAccessKey}\n`;
  replace('credentials', pair(s3Credentials.accessKeyId, 'another-secret'));
  const inPairs = { secretAccessKeyFile: undefined, credentialsFile: inFolder('credentials'), profile: 'kv' };
  const other = kept(await openS3(bench, { ...settings, accessKeyId: undefined, ...inPairs }));
  await vi.waitUntil(() => other.lookup(space, chain) === chain.length, limit);
  await reads(other);
  await server.setSecret('third-secret', 'SECONDKEY');
  await renew('credentials', pair('SECONDKEY', 'third-secret'));
  await server.revoke(s3Credentials.accessKeyId);
  await isOut(tier);
  await reads(other);
  expect(other.stats().inService).toBe(true);
  bucket.close();
}, 180_000);

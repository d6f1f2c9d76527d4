/** Two whole nodes over one real Redis: what one engine wrote, the other reads, and nobody waits for a server that is gone. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { RedisServer } from '../../../../infra/redis/servers.ts';
import { type CacheNode, openCacheNode } from './node.ts';
import { blockEngine } from './testing/block-engine.ts';

const count = 12;
let folder: string;
let server: RedisServer | undefined;
const nodes: CacheNode[] = [];

beforeEach(() => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-redis-'));
});
afterEach(async () => {
  for (const node of nodes.splice(0)) await node.close();
  await server?.stop();
  server = undefined;
  rmSync(folder, { recursive: true });
});

async function open(name: string, url: string, placement = {}): Promise<CacheNode> {
  const node = await openCacheNode({
    socketPath: path.join(folder, `${name}.sock`),
    dataDir: path.join(folder, name),
    arena: { bytes: 16 << 20, dir: '/dev/shm' },
    disk: null,
    redis: {
      ...{ mode: 'single', servers: [url], database: 0, bytes: 64 << 20, keyPrefix: 'kvtier:', partBytes: 524_224 },
      ...{ connections: 2, depth: 3, timeLimitMs: 2000, policies: {} },
    },
    placement,
    clock: systemClock,
    log: silent,
  });
  nodes.push(node);
  return node;
}

const engine = (name: string) => blockEngine(path.join(folder, `${name}.sock`), count);
const redisOf = (node: CacheNode) => node.store.stats().tiers.find(({ tier }) => tier === 'redis')!;

it('what one node wrote, another reads, encoded on the way; a dead server costs hits and nothing else', async () => {
  server = await RedisServer.start();
  const { url } = server;
  const a = await open('a', url, { redis: { codec: 'lz4' } });
  const b = await open('b', url);
  const [writer, reader] = [await engine('a'), await engine('b')];
  await writer.write('x');
  await vi.waitUntil(() => redisOf(a).blocks === count, { timeout: 20_000 });
  await vi.waitUntil(() => redisOf(b).blocks === count, { timeout: 20_000 });
  expect(redisOf(a).detail.codec_saved_bytes).toBeGreaterThan(0);
  expect(await reader.held('x')).toEqual([{ tier: 'redis', count }]);
  expect(await reader.read('x')).toBe(count);
  expect(await reader.held('x')).toEqual([{ tier: 'arena', count }]);

  await writer.write('y');
  await vi.waitUntil(() => redisOf(b).blocks === 2 * count, { timeout: 20_000 });
  await server.stop();
  expect(await reader.read('y')).toBe(0);
  expect(await reader.read('x')).toBe(count);
  await writer.write('z');
  expect(await writer.read('z')).toBe(count);
  for (const node of [a, b]) node.store.checkIntegrity();
  await writer.end();
  await reader.end();
}, 60_000);

it('a node starts before its server does', async () => {
  server = await RedisServer.start();
  const { url, port } = server;
  await server.stop();
  const node = await open('a', url);
  expect(redisOf(node)).toMatchObject({ inService: false, capacityBytes: 64 << 20 });
  const client = await engine('a');
  await client.write('x');
  expect(await client.read('x')).toBe(count);
  server = await RedisServer.start({ port });
  await vi.waitUntil(() => redisOf(node).inService, { timeout: 20_000 });
  await client.read('x'); // used again: written down now
  await vi.waitUntil(() => redisOf(node).blocks === count, { timeout: 20_000 });
  await client.end();
}, 60_000);

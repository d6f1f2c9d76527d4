/** Two whole nodes over one real Redis: what one engine wrote, the other reads, and nobody waits for a server that is gone. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { packed, RawClient } from '@kvtier/session/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { RedisServer } from '../../../../infra/redis/servers.ts';
import { type CacheNode, openCacheNode } from './node.ts';

const payloadBytes = 100_000;
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

/** An engine that writes and reads blocks whose bytes come from their names. */
async function engine(name: string) {
  const client = await RawClient.connect(path.join(folder, `${name}.sock`));
  const { arenaPath, arenaBytes, arenaId } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
  const arena = native.arenaOpen(arenaPath, Number(arenaBytes), arenaId);
  const bytesOf = (chain: string, index: number): Buffer => Buffer.alloc(payloadBytes, `${chain}:${index} `);
  return {
    client,
    async write(chain: string): Promise<void> {
      const request = { parent: Buffer.alloc(0), hashes: packed(chain, count) };
      const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
      for (const [index, offset] of offsets.entries()) native.arenaWrite(arena, Number(offset), bytesOf(chain, index));
      const checksums = [...(await native.arenaChecksum(arena, Float64Array.from(offsets, Number), payloadBytes))];
      await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
    },
    /** Blocks that came, all of them checked. */
    async read(chain: string): Promise<number> {
      const load = client.send({ $case: 'load', value: { hashes: packed(chain, count), deadlineMs: 10_000 } });
      const { loaded } = await client.answer(load, 'loadDone');
      for (let next = 0; next < loaded; ) {
        const { first, offsets } = await client.answer(load, 'ready');
        for (const [index, offset] of offsets.entries()) {
          const bytes = native.arenaRead(arena, Number(offset), payloadBytes);
          expect(bytes.equals(bytesOf(chain, first + index))).toBe(true);
        }
        next += offsets.length;
      }
      if (loaded > 0) await client.call({ $case: 'release', value: { loadId: load, corrupt: [] } }, 'done');
      return loaded;
    },
    held: async (chain: string) =>
      client.call({ $case: 'lookup', value: { hashes: packed(chain, count) } }, 'lookup').then(({ spans }) => spans),
    async end(): Promise<void> {
      await client.end();
      native.arenaClose(arena);
    },
  };
}

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

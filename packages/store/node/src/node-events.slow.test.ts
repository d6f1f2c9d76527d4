/**
 * A real subscriber hears what the tiers of a whole node come to hold and lose: stored, removed and cleared, of the arena and of the
 * disk. The disk is cleared by a file that cannot be made.
 */
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { type KvEvent, KvEventSubscriber } from '@kvtier/events';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { packed, RawClient } from '@kvtier/session/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { type CacheNode, openCacheNode } from './node.ts';

const payloadBytes = 100_000;
const count = 16;
let folder: string;
let dataDir: string;
let node: CacheNode | undefined;
let subscriber: KvEventSubscriber | undefined;

beforeEach(() => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-events-'));
  dataDir = path.join(folder, 'data');
  mkdirSync(dataDir);
});
afterEach(async () => {
  subscriber?.close();
  await node?.close();
  node = undefined;
  rmSync(folder, { recursive: true });
});

async function open(diskBytes: number, bufferSteps = 10_000): Promise<CacheNode> {
  // Whole hashes: the names of these blocks differ in their first bytes only.
  const kvEvents = { ...endpoints(), topic: 'kv@', intBlockHashes: false, bufferSteps };
  return openCacheNode({
    socketPath: path.join(folder, 'node.sock'),
    dataDir,
    arena: { bytes: 8 << 20, dir: '/dev/shm' },
    disk: { bytes: diskBytes, segmentBytes: 4 << 20, ioBackend: 'auto' },
    kvEvents,
    clock: systemClock,
    log: silent,
  });
}

const endpoints = () => ({ endpoint: `ipc://${folder}/pub`, replayEndpoint: `ipc://${folder}/replay` });

/** What a router knows from the events alone: hashes by medium. */
function follow(events: KvEventSubscriber) {
  const held = { CPU: new Set<string>(), DISK: new Set<string>() };
  const seen: string[] = [];
  const blockSizes = new Set<number>();
  const topics = new Set<string>();
  const heldIn = (medium: string | null | undefined) => held[medium as keyof typeof held];
  const apply = (event: KvEvent): void => {
    seen.push(`${event.type} ${event.medium}`);
    if (event.type === 'AllBlocksCleared') heldIn(event.medium).clear();
    if (event.type === 'BlockRemoved') for (const hash of event.blockHashes) heldIn(event.medium).delete(String(hash));
    if (event.type !== 'BlockStored') return;
    blockSizes.add(event.blockSize);
    for (const hash of event.blockHashes) heldIn(event.medium).add(String(hash));
  };
  const run = (async () => {
    for await (const item of events) {
      if (item.kind !== 'batch') continue;
      for (const event of item.batch.events) {
        topics.add(item.topic);
        apply(event);
      }
    }
  })();
  return { held, seen, blockSizes, topics, run };
}

it('stored, removed, cleared', async () => {
  node = await open(256 << 20);
  subscriber = new KvEventSubscriber(endpoints());
  const router = follow(subscriber);
  const client = await RawClient.connect(path.join(folder, 'node.sock'));
  const { arenaPath, arenaBytes, arenaId } = await client.attach({
    payloadBytes: BigInt(payloadBytes),
    blockTokens: 32,
  });
  const arena = native.arenaOpen(arenaPath, Number(arenaBytes), arenaId);
  const write = async (chain: string): Promise<void> => {
    const request = { parent: Buffer.alloc(0), hashes: packed(chain, count) };
    const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
    const taken = offsets.filter((offset) => offset !== 0n);
    const bytes = await native.arenaChecksum(arena, Float64Array.from(taken, Number), payloadBytes);
    await client.call({ $case: 'commit', value: { offsets: taken, checksums: [...bytes] } }, 'done');
  };
  const tierOf = (name: string) => node!.store.stats().tiers.find(({ tier }) => tier === name)!;

  await write('a');
  await vi.waitUntil(() => router.held.CPU.size === count && router.held.DISK.size === count, { timeout: 20_000 });
  expect(router.blockSizes).toEqual(new Set([32]));
  expect([...router.topics].every((topic) => /^kv@@[0-9a-f]{16}$/.test(topic))).toBe(true);

  // A folder where a segment is to be: neither made nor removed as a file.
  mkdirSync(path.join(dataDir, 'segments', 'segment-00000006.kvs.new'));
  for (let i = 0; i < 30; i++) {
    await write(`chain${i}`);
    await vi.waitUntil(() => tierOf('disk').blocks >= (i + 2) * count || !tierOf('disk').inService, {
      timeout: 20_000,
    });
    if (!tierOf('disk').inService) break;
  }
  // Evicted from the arena as it filled up: the router knows exactly what is left.
  await vi.waitUntil(() => router.held.CPU.size === tierOf('arena').blocks, { timeout: 20_000 });
  expect(router.seen).toContain('BlockRemoved CPU');
  expect(tierOf('disk').outOfServiceReason).toMatch(/segment-00000006.kvs.new: cannot be created/);
  await vi.waitUntil(() => router.seen.includes('AllBlocksCleared DISK'), { timeout: 20_000 });
  expect(router.held.DISK.size).toBe(0);
  await client.end();
  native.arenaClose(arena);
  await node.close();
  node = undefined;
  await vi.waitUntil(() => router.held.CPU.size === 0, { timeout: 20_000 });
  expect(router.seen.at(-1)).toBe('AllBlocksCleared CPU');
  subscriber.close();
  await router.run;
}, 60_000);

it('what the disk tier has brought over a restart is announced, and what is removed is withdrawn', async () => {
  node = await open(16 << 20);
  const write = async (chain: string): Promise<void> => {
    const client = await RawClient.connect(path.join(folder, 'node.sock'));
    const { arenaPath, arenaBytes, arenaId } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
    const arena = native.arenaOpen(arenaPath, Number(arenaBytes), arenaId);
    const request = { parent: Buffer.alloc(0), hashes: packed(chain, count) };
    const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
    const checksums = [...(await native.arenaChecksum(arena, Float64Array.from(offsets, Number), payloadBytes))];
    await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
    await client.end();
    native.arenaClose(arena);
  };
  await write('a');
  await node.close();
  node = await open(16 << 20);
  subscriber = new KvEventSubscriber(endpoints());
  const router = follow(subscriber);
  const disk = () => node!.store.stats().tiers.find(({ tier }) => tier === 'disk')!;
  expect(disk().blocks).toBe(count);
  // The announcement lies in the replay buffer; a new batch tells the subscriber that it missed something.
  for (let i = 0; i < 12; i++) {
    await write(`more${i}`);
    await vi.waitUntil(() => router.held.DISK.size === disk().blocks, { timeout: 20_000 });
  }
  await vi.waitUntil(() => router.seen.includes('BlockRemoved DISK'), { timeout: 20_000 });
  await vi.waitUntil(() => router.held.DISK.size === disk().blocks, { timeout: 20_000 });
  subscriber.close();
  await router.run;
}, 60_000);

it('who comes late hears of all that is held, when its events are long gone', async () => {
  node = await open(64 << 20, 1);
  const client = await RawClient.connect(path.join(folder, 'node.sock'));
  const { arenaPath, arenaBytes, arenaId } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
  const arena = native.arenaOpen(arenaPath, Number(arenaBytes), arenaId);
  for (const chain of ['a', 'b']) {
    const request = { parent: Buffer.alloc(0), hashes: packed(chain, count) };
    const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
    const checksums = [...(await native.arenaChecksum(arena, Float64Array.from(offsets, Number), payloadBytes))];
    await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
  }
  const disk = () => node!.store.stats().tiers.find(({ tier }) => tier === 'disk')!;
  await vi.waitUntil(() => disk().blocks === 2 * count, { timeout: 20_000 });
  subscriber = new KvEventSubscriber(endpoints());
  const router = follow(subscriber);
  await vi.waitUntil(() => router.held.CPU.size === 2 * count && router.held.DISK.size === 2 * count, {
    timeout: 20_000,
  });
  expect(subscriber.stats().snapshots).toBe(1);
  await client.end();
  native.arenaClose(arena);
  subscriber.close();
  await router.run;
}, 60_000);

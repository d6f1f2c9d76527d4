/** Two whole nodes that are peers: what one engine wrote, the other reads out of that node, and nobody waits for a node that is gone. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { freePort } from '../../../../infra/ports.ts';
import { type CacheNode, openCacheNode } from './node.ts';
import { blockEngine } from './testing/block-engine.ts';

const count = 12;
let folder: string;
const nodes: CacheNode[] = [];

beforeEach(() => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-peers-'));
});
afterEach(async () => {
  for (const node of nodes.splice(0)) await node.close();
  rmSync(folder, { recursive: true });
});

const security = { encryption: 'none' as const, secret: Buffer.alloc(32, 5) };

async function open(name: string, port: number, peer: number): Promise<CacheNode> {
  const node = await openCacheNode({
    socketPath: path.join(folder, `${name}.sock`),
    dataDir: path.join(folder, name),
    arena: { bytes: 16 << 20, dir: '/dev/shm' },
    disk: null,
    peers: {
      ...{ listen: { host: '127.0.0.1', port, dataPort: 0 }, peers: [{ host: '127.0.0.1', port: peer }], security },
      ...{ streams: 2, readLimitMs: 2000, maxBlocks: 10_000 },
    },
    clock: systemClock,
    log: silent,
  });
  nodes.push(node);
  return node;
}

const engine = (name: string) => blockEngine(path.join(folder, `${name}.sock`), count);
const peerOf = (node: CacheNode) => node.store.stats().tiers.find(({ tier }) => tier === 'peer')!;

it('what one node holds, the other reads; a dead peer costs hits and nothing else', async () => {
  const [portA, portB] = [await freePort(), await freePort()];
  const a = await open('a', portA, portB);
  const b = await open('b', portB, portA);
  const [writer, reader] = [await engine('a'), await engine('b')];
  await writer.write('x');
  await vi.waitUntil(() => peerOf(b).blocks === count, { timeout: 20_000 });
  expect(await reader.held('x')).toEqual([{ tier: 'peer', count }]);
  expect(await reader.read('x')).toBe(count);
  expect(await reader.held('x')).toEqual([{ tier: 'arena', count }]);
  await writer.write('y');
  await vi.waitUntil(() => peerOf(b).blocks === 2 * count, { timeout: 20_000 });
  await writer.end();
  nodes.splice(nodes.indexOf(a), 1);
  await a.close();
  expect(await reader.read('y')).toBe(0);
  expect(await reader.read('x')).toBe(count);
  await vi.waitUntil(() => peerOf(b).blocks === 0, { timeout: 20_000 });
  b.store.checkIntegrity();
  await reader.end();
}, 60_000);

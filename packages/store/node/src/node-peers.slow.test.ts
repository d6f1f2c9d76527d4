/** Two whole nodes that are peers: what one engine wrote, the other reads out of that node, and nobody waits for a node that is gone. */
import { mkdtempSync, rmSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { headerBytes } from '@kvtier/identity';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { packed } from '@kvtier/session/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { freePort } from '../../../../infra/ports.ts';
import { type CacheNode, openCacheNode } from './node.ts';
import { blockEngine } from './testing/block-engine.ts';

const count = 12;
const payloadBytes = 100_000;
/** Of conditions that hold soon, on a machine that does many other things. */
const patience = { timeout: 20_000 };
let folder: string;
const nodes: CacheNode[] = [];

beforeEach(() => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-peers-'));
});
afterEach(async () => {
  for (const node of nodes.splice(0)) await node.close();
  rmSync(folder, { recursive: true });
});

const security = { encryption: 'none' as const, secrets: [Buffer.alloc(32, 5)] };

async function open(name: string, port: number, peer: number): Promise<CacheNode> {
  const node = await openCacheNode({
    socketPath: path.join(folder, `${name}.sock`),
    dataDir: path.join(folder, name),
    arena: { bytes: 16 << 20, dir: '/dev/shm' },
    disk: null,
    operations: { host: '127.0.0.1', port: 0 },
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

const engine = (name: string) => blockEngine(path.join(folder, `${name}.sock`), count, payloadBytes);
const peerOf = (node: CacheNode) => node.store.stats().tiers.find(({ tier }) => tier === 'peer')!;

it('what one node holds, the other reads; a dead peer costs hits and nothing else', async () => {
  const [portA, portB] = [await freePort(), await freePort()];
  const a = await open('a', portA, portB);
  const b = await open('b', portB, portA);
  const [writer, reader] = [await engine('a'), await engine('b')];
  await writer.write('x');
  await vi.waitUntil(() => peerOf(b).blocks === count && peerOf(b).detail!.usable_peers === 1, { timeout: 20_000 });
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

it('tells in its metrics who was refused, who is connected, and what was given', async () => {
  const [portA, portB] = [await freePort(), await freePort()];
  const a = await open('a', portA, portB);
  const b = await open('b', portB, portA);
  const told = async (): Promise<Record<string, number>> => {
    const text = await (await fetch(`${a.operationsUrl}/metrics`)).text();
    const lines = text.matchAll(/^kvtier_node_events\{event="peers\.([\w.]+)"\} (\d+)$/gm);
    return Object.fromEntries([...lines].map(([, name, count]) => [name!, Number(count)]));
  };
  const before = { refused: 0, 'sent.blocks': 0, 'sent.bytes': 0, declined: 0, corrupt: 0, unknown_messages: 0 };
  await vi.waitFor(async () => expect(await told()).toEqual({ connected: 1, ...before }), patience);
  connect(portA, '127.0.0.1').end('not a peer\r\n').resume();
  await vi.waitFor(async () => expect((await told()).refused).toBe(1), patience);
  const [writer, reader] = [await engine('a'), await engine('b')];
  await writer.write('x');
  await vi.waitFor(() => expect(peerOf(b).blocks).toBe(count), patience);
  await vi.waitFor(() => expect(peerOf(b).detail!.usable_peers).toBe(1), patience);
  expect(await reader.read('x')).toBe(count);
  const sent = { refused: 1, 'sent.blocks': count, 'sent.bytes': count * (headerBytes + payloadBytes) };
  await vi.waitFor(async () => expect(await told()).toEqual({ connected: 1, ...before, ...sent }), patience);
  await Promise.all([reader.end(), writer.end()]);
}, 60_000);

it('a ticket that is shown at one node ends the pin at the other, which holds the block', async () => {
  const [near, far] = [await freePort(), await freePort()];
  await open('near', near, far);
  const node = await open('far', far, near);
  const [reader, writer] = [await engine('near'), await engine('far')];
  await writer.write('x');
  await vi.waitFor(async () => expect(await reader.held('x')).toEqual([{ tier: 'peer', count }]), patience);
  const ticket = Buffer.alloc(16, 3);
  const hashes = packed('x', count);
  const pin = await writer.client.call({ $case: 'pin', value: { hashes, ttlMs: 600_000, ticket } }, 'done');
  expect(pin.count).toBe(count);
  const shown = () => node.store.counters.get('pin.tickets.shown') ?? 0;
  const show = (said: Buffer, name: string) =>
    reader.client.call({ $case: 'endPin', value: { ticket: said, hash: packed(name, 1) } }, 'done');
  // Nobody holds this block: nobody is told. The other one's ticket is nobody's.
  expect(await show(ticket, 'y')).toEqual({ count: 0 });
  expect(await show(Buffer.alloc(16, 4), 'x')).toEqual({ count: 0 });
  await vi.waitFor(() => expect(node.store.counters.get('pin.tickets.unknown')).toBe(1), patience);
  expect(shown()).toBe(0);
  expect(await show(ticket, 'x')).toEqual({ count: 0 });
  await vi.waitFor(() => expect(shown()).toBe(1), patience);
  expect((await writer.client.call({ $case: 'unpin', value: { hashes } }, 'done')).count).toBe(0);
  await Promise.all([reader.end(), writer.end()]);
});

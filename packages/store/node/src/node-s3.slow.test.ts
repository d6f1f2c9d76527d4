/**
 * A node beside an S3 server that takes connections and answers none: it starts, serves, and has the tier when the server speaks. And
 * beside one that refuses writes: it starts with what is there.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { FakeBucket } from '@kvtier/tiers/s3/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { type CacheNode, openCacheNode } from './node.ts';
import { blockEngine } from './testing/block-engine.ts';

const count = 12;
let folder: string;
let bucket: FakeBucket;
let node: CacheNode | undefined;
beforeEach(async () => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-s3-'));
  bucket = await FakeBucket.start();
});
afterEach(async () => {
  await node?.close();
  node = undefined;
  await bucket.stop();
  rmSync(folder, { recursive: true });
});

const socketPath = () => path.join(folder, 'node.sock');
async function started(write: 'through' | 'none'): Promise<CacheNode> {
  node = await openCacheNode({
    ...{ socketPath: socketPath(), dataDir: path.join(folder, 'data') },
    ...{ arena: { bytes: 16 << 20, dir: '/dev/shm' }, disk: null },
    // Limits as by default: 15 s for all tries.
    s3: { bucket: bucket.name, endpoint: bucket.endpoint, bytes: 64 << 20, accessKeyId: 'a', secretAccessKey: 'b' },
    ...{ placement: { s3: { write } }, clock: systemClock, log: silent },
  });
  return node;
}

const s3Of = ({ store }: CacheNode) => store.stats().tiers.find(({ tier }) => tier === 's3')!;

it('a node starts while its server is silent, and has the tier when that speaks', async () => {
  let speak: () => void = () => {};
  const silence = new Promise<void>((resolve) => {
    speak = resolve;
  });
  bucket.fault = () => silence;
  const silenced = await started('through');
  expect(bucket.requests.length).toBeGreaterThan(0);
  // It has started before the tier's first opening has ended: that would leave another reason.
  const outOfServiceReason = expect.stringMatching(/^s3: not open after \d+ s; its server may be silent$/);
  expect(s3Of(silenced)).toMatchObject({ inService: false, outOfServiceReason });
  const client = await blockEngine(socketPath(), count);
  await client.write('x');
  expect(await client.read('x')).toBe(count);
  bucket.fault = () => undefined;
  speak();
  await vi.waitUntil(() => s3Of(silenced).inService, { timeout: 20_000 });
  await client.write('y');
  await vi.waitUntil(() => s3Of(silenced).blocks >= count, { timeout: 20_000 });
  await client.end();
}, 60_000);

it.each([
  ['through', 'PUT', 'QuotaExceeded', 1],
  // It lacks nothing that it needs.
  ['none', 'PUT, DELETE', 'AccessDenied', 0],
] as const)(
  'a node whose s3 is written %s starts beside a server that refuses %s, and reads',
  async (write, refused, word, writesRefused) => {
    const first = await started('through');
    const writer = await blockEngine(socketPath(), count);
    await writer.write('x');
    await vi.waitUntil(() => s3Of(first).blocks >= count, { timeout: 20_000 });
    await writer.end();
    await first.close();
    bucket.fault = ({ method }) => (refused.includes(method) ? { status: 403, word } : undefined);
    const second = await started(write);
    await vi.waitUntil(() => s3Of(second).blocks >= count, { timeout: 20_000 });
    expect(s3Of(second)).toMatchObject({ inService: true, detail: { writes_refused: writesRefused } });
    const reader = await blockEngine(socketPath(), count);
    expect(await reader.read('x')).toBe(count);
    await reader.end();
  },
  60_000,
);

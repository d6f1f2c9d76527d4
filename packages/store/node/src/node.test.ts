/** A whole node in this process, with a real arena: bytes go in and come out right, and its end leaves nothing. */
import { execFileSync } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, statfsSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { HeldBlocks } from '@kvtier/data-plane/held-table';
import { arenaPrefix } from '@kvtier/data-plane/places';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { packed, RawClient } from '@kvtier/session/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { brokenReadMs, openCacheNode } from './node.ts';

const payloadBytes = 10_000;
const arenaDir = '/dev/shm';
let folder: string;
let dataDir: string;
const arenaFiles = (): string[] => {
  const prefix = arenaPrefix(dataDir);
  return readdirSync(arenaDir).filter((name) => name.startsWith(prefix));
};
const open = (changes: object = {}) =>
  openCacheNode({
    socketPath: path.join(folder, 'node.sock'),
    dataDir,
    arena: { bytes: 4 << 20, dir: arenaDir },
    disk: null,
    clock: systemClock,
    log: silent,
    ...changes,
  });

beforeEach(() => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-'));
  dataDir = path.join(folder, 'data');
});
afterEach(() => rmSync(folder, { recursive: true }));

it('bytes written into the arena are served again, also when blocks had to go for them', async () => {
  const node = await open();
  const client = await RawClient.connect(path.join(folder, 'node.sock'));
  const attached = await client.attach({ payloadBytes: BigInt(payloadBytes) });
  const arena = native.arenaOpen(attached.arenaPath, Number(attached.arenaBytes), attached.arenaId);
  const bytesOf = (name: string, index: number): Buffer => Buffer.alloc(payloadBytes, `${name}:${index}`);
  const count = 100;
  for (const name of ['a', 'b', 'c', 'd', 'e']) {
    const request = { parent: Buffer.alloc(0), hashes: packed(name, count) };
    const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
    expect(offsets).not.toContain(0n);
    for (const [index, offset] of offsets.entries()) native.arenaWrite(arena, Number(offset), bytesOf(name, index));
    const checksums = [...(await native.arenaChecksum(arena, Float64Array.from(offsets, Number), payloadBytes))];
    await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
    const load = client.send({ $case: 'load', value: { hashes: packed(name, count), deadlineMs: 1000 } });
    const ready = await client.answer(load, 'ready');
    expect(ready).toEqual({ first: 0, offsets, checksums, tier: 'arena' });
    for (const [index, offset] of ready.offsets.entries()) {
      expect(native.arenaRead(arena, Number(offset), payloadBytes).equals(bytesOf(name, index))).toBe(true);
    }
    await client.call({ $case: 'release', value: { loadId: load, corrupt: [] } }, 'done');
  }
  const arenaStats = node.store.stats().tiers[0]!;
  expect(arenaStats.evictions).toBeGreaterThan(0);
  expect(arenaStats.bytes).toBeLessThanOrEqual(arenaStats.capacityBytes);
  // Chains shrink from their tail: whatever is left of one is a prefix.
  const { held } = await client.call({ $case: 'lookup', value: { hashes: packed('a', count) } }, 'lookup');
  expect(held).toBeLessThan(count);
  node.store.checkIntegrity();
  await client.end();
  native.arenaClose(arena);
  await node.close();
  expect(arenaFiles()).toEqual([]);
  expect(existsSync(path.join(folder, 'node.sock'))).toBe(false);
});

it('tells beside the arena which blocks are held, before it answers', async () => {
  const node = await open();
  const client = await RawClient.connect(path.join(folder, 'node.sock'));
  const { arenaPath, heldTag } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
  const table = HeldBlocks.open(arenaPath, heldTag!)!;
  const hashBytes = packed('a', 1).length;
  const names = Array.from({ length: 20 }, (_, at) => createHash('sha256').update(`${at}`).digest());
  const hashes = Buffer.concat(names.map((name) => name.subarray(0, hashBytes)));
  const told = (): number => {
    let count = 0;
    for (let at = 0; at < hashes.length; at += hashBytes) if (table.flags(hashes, at) === 7) count++;
    return count;
  };
  expect(told()).toBe(0);
  const { offsets } = await client.call(
    { $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: hashes.subarray(0, hashes.length / 2) } },
    'reserved',
  );
  expect(told()).toBe(0);
  await client.call({ $case: 'commit', value: { offsets, checksums: offsets.map(() => 1n) } }, 'done');
  expect(told()).toBe(10);
  table.close();
  expect(table.flags(hashes, 0)).toBeUndefined();
  await client.end();
  await node.close();
});

it('tells nothing of what is held where the arena leaves no room beside it', async (context) => {
  const small = path.join(folder, 'small');
  mkdirSync(small);
  try {
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', small], { stdio: 'pipe' });
  } catch (error) {
    console.warn(`SKIPPED: a full tmpfs: ${(error as Error).message.trim().split('\n').at(-1)}; run as root`);
    return context.skip();
  }
  try {
    const node = await open({ arena: { bytes: 4 << 20, dir: small } });
    const client = await RawClient.connect(path.join(folder, 'node.sock'));
    const { heldTag, hasLockFile } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
    expect([heldTag, hasLockFile]).toEqual([undefined, true]);
    await client.end();
    await node.close();
  } finally {
    execFileSync('umount', [small]);
  }
});

it('keeps no table of what is held where it cannot be mapped, and serves', async () => {
  const refused = vi.spyOn(native, 'mapShared').mockImplementation(() => {
    throw new Error('mmap: no memory');
  });
  try {
    const node = await open();
    expect(refused).toHaveBeenCalledOnce();
    const client = await RawClient.connect(path.join(folder, 'node.sock'));
    const { arenaPath, heldTag, hasLockFile } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
    expect([heldTag, hasLockFile, HeldBlocks.open(arenaPath, 0)]).toEqual([undefined, true, null]);
    const hashes = packed('a', 3);
    const { offsets } = await client.call({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes } }, 'reserved');
    await client.call({ $case: 'commit', value: { offsets, checksums: offsets.map(() => 1n) } }, 'done');
    expect((await client.call({ $case: 'lookup', value: { hashes } }, 'lookup')).held).toBe(3);
    await client.end();
    await node.close();
  } finally {
    refused.mockRestore();
  }
});

it('tells how much of its arena lies in huge pages', async (context) => {
  const huge = path.join(folder, 'huge');
  mkdirSync(huge);
  try {
    execFileSync('mount', ['-t', 'tmpfs', '-o', 'huge=always,size=64m', 'tmpfs', huge], { stdio: 'pipe' });
  } catch (error) {
    console.warn(`SKIPPED: huge pages of an arena: ${(error as Error).message.trim().split('\n').at(-1)}; run as root`);
    return context.skip();
  }
  try {
    const bytes = 16 << 20;
    const node = await open({ arena: { bytes, dir: huge } });
    const { huge_page_bytes: hugeBytes } = node.store.stats().tiers[0]!.detail;
    expect(hugeBytes).toBeGreaterThan(0);
    expect(hugeBytes).toBeLessThanOrEqual(bytes);
    await node.close();
  } finally {
    execFileSync('umount', [huge]);
  }
});

it('a start that fails half-way leaves nothing open', async () => {
  writeFileSync(path.join(folder, 'node.sock'), 'no socket');
  await expect(open()).rejects.toMatchObject({ code: 'SETUP' });
  expect(arenaFiles()).toEqual([]);
  rmSync(path.join(folder, 'node.sock'));
  const node = await open();
  await expect(open({ socketPath: path.join(folder, 'other.sock') })).rejects.toMatchObject({ code: 'LOCKED' });
  expect(arenaFiles()).toEqual([path.basename(node.arenaPath), path.basename(`${node.arenaPath}.lock`)]);
  await node.close();
  expect(arenaFiles()).toEqual([]);
});

it('the arena of a node that was killed is removed by the next one, and only that', async () => {
  await (await open()).close();
  const prefix = arenaPrefix(dataDir);
  const stranger = path.join(arenaDir, `kvtier-00000000-${process.pid}`);
  writeFileSync(path.join(arenaDir, `${prefix}dead`), '');
  writeFileSync(path.join(arenaDir, `${prefix}dead.lock`), '');
  writeFileSync(stranger, '');
  try {
    const node = await open();
    expect(arenaFiles()).toEqual([path.basename(node.arenaPath), path.basename(`${node.arenaPath}.lock`)]);
    expect(existsSync(stranger)).toBe(true);
    await node.close();
  } finally {
    rmSync(stranger);
  }
});

it('answers probes from before its tiers are open until all of it is closed', async () => {
  const node = await open({ operations: { host: '127.0.0.1', port: 0 } });
  const ready = async (): Promise<readonly [number, unknown]> => {
    const answer = await fetch(`${node.operationsUrl}/health/ready`);
    return [answer.status, await answer.json()];
  };
  expect(await ready()).toEqual([200, { status: 'ok' }]);
  let end = (): void => {};
  const { store } = node;
  const hang = vi.spyOn(store, 'close').mockImplementation(async () => {
    await new Promise<void>((resolve) => {
      end = resolve;
    });
    hang.mockRestore();
    await store.close();
  });
  const closed = node.close();
  await vi.waitUntil(() => hang.mock.calls.length > 0, { timeout: 20_000 });
  expect(await ready()).toEqual([503, { status: 'unavailable', why: 'draining: the node ends' }]);
  expect((await fetch(`${node.operationsUrl}/health/live`)).status).toBe(200);
  expect(await (await fetch(`${node.operationsUrl}/metrics`)).text()).toContain('kvtier_tier_blocks{tier="arena"} 0');
  end();
  await closed;
  await expect(ready()).rejects.toThrow();
  const quiet = await open();
  expect(quiet.operationsUrl).toBeUndefined();
  await quiet.close();
});

it('whose arena somebody removes is not ready, says so once, and ends what there is in order', async () => {
  const lines: string[] = [];
  const log = { ...silent, error: (_fields: object, line: string) => void lines.push(line) };
  const onArenaGone = vi.fn<(close: () => Promise<void>) => void>();
  const node = await open({ operations: { host: '127.0.0.1', port: 0 }, log, onArenaGone });
  const before = await RawClient.connect(path.join(folder, 'node.sock'));
  await before.attach({ payloadBytes: BigInt(payloadBytes) });
  rmSync(node.arenaPath);
  writeFileSync(node.arenaPath, 'of somebody else');
  const after = await RawClient.connect(path.join(folder, 'node.sock'));
  await expect(after.attach({ payloadBytes: BigInt(payloadBytes) })).rejects.toThrow(`${node.arenaPath} was removed`);
  rmSync(node.arenaPath);
  await vi.waitUntil(() => onArenaGone.mock.calls.length > 0, { timeout: 20_000 });
  const ready = await fetch(`${node.operationsUrl}/health/ready`);
  const why = `the arena's file ${node.arenaPath} was removed: no engine can attach`;
  expect([ready.status, await ready.json()]).toEqual([503, { status: 'unavailable', why }]);
  const { held } = await before.call({ $case: 'lookup', value: { hashes: packed('a', 1) } }, 'lookup');
  expect(held).toBe(0);
  await onArenaGone.mock.calls[0]![0]();
  await node.close(); // once more
  await before.ended;
  expect(onArenaGone).toHaveBeenCalledOnce();
  expect(lines).toEqual([expect.stringContaining('RemoveIPC')]);
  expect(arenaFiles()).toEqual([]);
  expect(existsSync(path.join(folder, 'node.sock'))).toBe(false);
  await (await open()).close();
});

it('says so where its arena lies on a disk, and serves', async () => {
  const isOnDisk = statfsSync(folder).type !== statfsSync(arenaDir).type;
  const lines: string[] = [];
  const log = { ...silent, warn: (_fields: object, line: string) => void lines.push(line) };
  await (await open({ log })).close();
  expect(lines).toEqual([]);
  await (await open({ log, arena: { bytes: 4 << 20, dir: folder } })).close();
  expect(lines).toEqual(isOnDisk ? [expect.stringMatching(/^arena\.dir is on a disk/)] : []);
});

it('slots of a read that a tier broke off are used again when no read of any tier can take longer', () => {
  const of = (redisMs: number, s3Ms: number, peersMs: number): number =>
    brokenReadMs({
      redis: { timeLimitMs: redisMs },
      s3: { timeLimitMs: s3Ms },
      peers: { readLimitMs: peersMs },
    } as Parameters<typeof brokenReadMs>[0]);
  expect([brokenReadMs({}), of(2_000, 15_000, 5_000)]).toEqual([60_000, 60_000]);
  expect([of(60_000, 100, 1), of(50, 600_000, 1), of(50, 100, 600_000)]).toEqual([125_000, 1_205_000, 1_205_000]);
});

/** Engines of other users and of other pid namespaces: who gets in by a group, and by what lock it is seen that one has ended. */
import { closeSync, mkdtempSync, openSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { packed, type RawClient } from './testing/raw-client.ts';
import { ServedBench } from './testing/served-bench.ts';

const patience = { timeout: 20_000 };
const group = process.getgid!();

let rig: ServedBench;
beforeEach(() => {
  rig = new ServedBench();
});
afterEach(() => rig.close());

describe('a group', () => {
  const stranger = { group, peerCredentials: () => ({ pid: 1, uid: 4711 }) };

  it('owns the socket and the folder that is made for it', async () => {
    rig.more = { group };
    await rig.start();
    const modeOf = (file: string): string => `${(statSync(file).mode & 0o777).toString(8)} ${statSync(file).gid}`;
    expect([modeOf(rig.socketPath), modeOf(path.dirname(rig.socketPath))]).toEqual([`660 ${group}`, `750 ${group}`]);
    expect((await rig.attached()).id.length).toBe(16);
  });

  it('lets in who is a member, by any of his groups', async () => {
    rig.more = { ...stranger, peerGroups: () => [group + 1, group] };
    await rig.start();
    expect((await rig.attached()).id.length).toBe(16);
  });

  it.each([
    ['nobody else', { ...stranger, peerGroups: () => [group + 1] }],
    ['nobody without one', { ...stranger, group: null, peerGroups: () => [group] }],
  ])('lets %s in', async (_who, more) => {
    rig.more = more;
    await rig.start();
    await (await rig.connect()).ended;
    expect(rig.bench.store.counters.get('session.refused.uid')).toBe(1);
  });
});

describe('a lock on a byte of the file beside the arena', () => {
  let folder: string;
  let file: string;
  let nodes: number;
  const hold = (client: RawClient, byte: bigint) => client.call({ $case: 'hold', value: { byte } }, 'done');
  const reserve = (client: RawClient) =>
    client.call({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('x', 2) } }, 'reserved');

  beforeEach(() => {
    folder = mkdtempSync(path.join(tmpdir(), 'kvtier-lock-'));
    file = path.join(folder, 'arena.lock');
    nodes = openSync(file, 'wx+');
    rig.more = { isByteHeld: (byte) => native.isByteHeld(nodes, byte), peerCredentials: () => ({ pid: 0, uid: 0 }) };
  });
  afterEach(() => {
    closeSync(nodes);
    rmSync(folder, { recursive: true });
  });

  it('is offered, and its end gives the slots back although no process can be seen', async () => {
    await rig.start();
    const client = await rig.connect();
    expect((await client.attach()).hasLockFile).toBe(true);
    const byte = 2 ** 53 - 1;
    const [engine, worker] = [openSync(file, 'r'), openSync(file, 'r')];
    expect([native.holdByte(engine, byte), native.holdByte(worker, byte)]).toEqual([true, true]);
    expect((await hold(client, BigInt(byte))).count).toBe(1);
    await reserve(client);
    await client.end();
    await vi.waitUntil(() => rig.server!.quarantined === 1, patience);
    closeSync(engine);
    await new Promise((resolve) => setTimeout(resolve, 100)); // ten polls: another process of the engine still copies
    expect(rig.server!.quarantined).toBe(1);
    closeSync(worker);
    await vi.waitUntil(() => rig.server!.quarantined === 0, patience);
    expect(rig.bench.store.counters.get('quarantine.lifted.lock_ended')).toBe(1);
  });

  it('that nobody holds counts as none', async () => {
    await rig.start();
    const client = await rig.attached();
    expect((await hold(client, 5n)).count).toBe(0);
    await reserve(client);
    await client.end();
    await vi.waitUntil(() => rig.server!.quarantined === 1, patience);
    await new Promise((resolve) => setTimeout(resolve, 100));
    expect(rig.server!.quarantined).toBe(1);
  });

  it.each([0n, 1n << 53n, (1n << 64n) - 1n])('byte %s cannot be', async (byte) => {
    await rig.start();
    const client = await rig.attached();
    await expect(hold(client, byte)).rejects.toMatchObject({ code: 'PROTOCOL' });
    await client.ended;
  });
});

/** Nodes that find each other by the list of members in Redis: peers come and go with no word in any configuration. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { announceNode, MemberReader } from '@kvtier/membership';
import { Lines, memberServers } from '@kvtier/membership/testing';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { packed, RawClient } from '@kvtier/session/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { RedisServer } from '../../../../infra/redis/servers.ts';
import { followPeers, joinCluster } from './membership.ts';
import { type CacheNode, openCacheNode } from './node.ts';
import type { Peers } from './peers.ts';

const payloadBytes = 10_000;
const count = 8;
let folder: string;
let server: RedisServer;
const ends: (() => Promise<unknown>)[] = [];
beforeEach(async () => {
  folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-members-'));
  server = await RedisServer.start();
});
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
  await server.stop();
  rmSync(folder, { recursive: true });
});
const security = { encryption: 'none' as const, secrets: [Buffer.alloc(32, 5)] };

async function open(name: string): Promise<CacheNode> {
  const node = await openCacheNode({
    socketPath: path.join(folder, `${name}.sock`),
    dataDir: path.join(folder, name),
    arena: { bytes: 16 << 20, dir: '/dev/shm' },
    disk: null,
    peers: {
      ...{ listen: { host: '127.0.0.1', port: 0, dataPort: 0 }, peers: [], security },
      ...{ streams: 2, readLimitMs: 2_000, maxBlocks: 10_000 },
    },
    membership: { redis: memberServers([server.url]), leaseMs: 1_500, name },
    clock: systemClock,
    log: silent,
  });
  ends.push(() => node.close());
  return node;
}

const peerOf = (node: CacheNode) => node.store.stats().tiers.find(({ tier }) => tier === 'peer')!;
const peersOf = (node: CacheNode): (number | undefined)[] => {
  const { configured_peers, usable_peers } = peerOf(node).detail!;
  return [configured_peers, usable_peers];
};
const soon = { timeout: 20_000 };

async function write(name: string, chain: string): Promise<void> {
  const client = await RawClient.connect(path.join(folder, `${name}.sock`));
  const { arenaPath, arenaBytes, arenaId } = await client.attach({ payloadBytes: BigInt(payloadBytes) });
  const arena = native.arenaOpen(arenaPath, Number(arenaBytes), arenaId);
  const request = { parent: Buffer.alloc(0), hashes: packed(chain, count) };
  const { offsets } = await client.call({ $case: 'reserve', value: request }, 'reserved');
  const checksums = [...(await native.arenaChecksum(arena, Float64Array.from(offsets, Number), payloadBytes))];
  await client.call({ $case: 'commit', value: { offsets, checksums } }, 'done');
  native.arenaClose(arena);
  await client.end();
}

it('a node is a peer of all others from its start to its end, and of one that comes after it left', async () => {
  const a = await open('a');
  const b = await open('b');
  await vi.waitUntil(() => String([peersOf(a), peersOf(b)]) === '1,1,1,1', soon);
  await write('a', 'x');
  await vi.waitUntil(() => peerOf(b).blocks === count, soon);
  const c = await open('c');
  await vi.waitUntil(() => peerOf(c).blocks === count && String([peersOf(a), peersOf(b)]) === '2,2,2,2', soon);
  await a.close();
  await vi.waitUntil(() => String([peersOf(b), peersOf(c)]) === '1,1,1,1', soon);
  expect([peerOf(b).blocks, peerOf(c).blocks]).toEqual([0, 0]);
  // Redis away: peers stay.
  await server.kill();
  await write('b', 'y');
  await vi.waitUntil(() => peerOf(c).blocks === count, soon);
  await server.start();
  const d = await open('d');
  await vi.waitUntil(() => peerOf(d).blocks === count && String(peersOf(d)) === '2,2', soon);
  for (const node of [b, c, d]) node.store.checkIntegrity();
}, 60_000);

it('beyond loopback only with TLS, or where the network is trusted', async () => {
  const redis = memberServers([server.url]);
  const lines = new Lines();
  for (const [name, host] of [
    ['near', '127.0.0.1'],
    ['far', '10.0.0.1'],
    ['named', '127.evil.example'],
  ] as const) {
    const member = announceNode({ name, peer: { host, port: 7 }, events: null }, { redis, leaseMs: 1_500, log: lines });
    ends.push(() => member.close());
  }
  const hostsBy = async (security: Parameters<typeof followPeers>[2], wanted: string): Promise<string[]> => {
    let hosts: string[] = [];
    const log = new Lines();
    const setOthers: Peers['setOthers'] = (others) => {
      hosts = others.map(({ host }) => host);
      return others;
    };
    const reader = followPeers({ name: 'self', redis, leaseMs: 1_500 }, { setOthers }, security, log);
    await vi.waitUntil(() => [...hosts].sort().join() === wanted, soon);
    await reader.close();
    return log.all;
  };
  await lines.until(/node:near/);
  await lines.until(/node:far/);
  await lines.until(/node:named/);
  const refused = (peer: string, host: string): string =>
    `warn a node of the list is no peer {"peer":"${peer}","reason":"${host} is not loopback: use \\"tls\\", or say \\"trustedNetwork\\": true"}`;
  expect((await hostsBy(security, '127.0.0.1')).sort()).toEqual([
    refused('far', '10.0.0.1'),
    refused('named', '127.evil.example'),
  ]);
  const all = '10.0.0.1,127.0.0.1,127.evil.example';
  expect(await hostsBy({ ...security, trustedNetwork: true }, all)).toEqual([]);
  const tls = { encryption: 'tls', cert: Buffer.of(), key: Buffer.of(), ca: Buffer.of() } as const;
  expect(await hostsBy(tls, all)).toEqual([]);
}, 60_000);

it.each([18, 64, 70])(
  '%i nodes: all are peers of one, or the list says which ones are',
  async (count) => {
    const redis = memberServers([server.url]);
    const lines = new Lines();
    const place = (at: number) => ({ host: '127.0.0.1', port: 1_000 + at });
    const nameOf = (port: number): string => `n${port - 1_000}`;
    const join = (at: number) => {
      const options = { name: `n${at}`, redis, leaseMs: 10_000 };
      const member = joinCluster(options, { peer: place(at), events: null }, lines);
      ends.push(() => member.close());
      return { options, member };
    };
    const others = Array.from({ length: count - 1 }, (_, at) => join(at + 1));
    const { options, member } = join(0);
    // As the tier of peers does it: the first 64.
    let peers: readonly number[] = [];
    const setOthers: Peers['setOthers'] = (addresses) => {
      const kept = addresses.slice(0, 64);
      peers = kept.map(({ port }) => port);
      return kept;
    };
    let told: readonly string[] | undefined;
    const changes: object[] = [];
    const listening = {
      change: (part: Parameters<typeof member.change>[0]) => changes.push(part) && member.change(part),
    };
    let seen = 0;
    const ofOld: (readonly string[] | undefined)[] = [];
    const reader = new MemberReader({
      ...{ redis, pollMs: 50, log: lines, problem: () => {} },
      changed: ({ nodes }) => {
        seen = nodes.length;
        told = nodes.find(({ name }) => name === 'n0')?.peers;
        ofOld.push(nodes.find(({ name }) => name === 'n1')?.peers);
      },
    });
    ends.push(() => reader.close());
    const following = followPeers(options, { setOthers }, security, lines, listening);
    ends.push(() => following.close());
    await vi.waitUntil(() => seen === count && peers.length === Math.min(count - 1, 64), soon);
    if (count <= 65) expect(changes).toEqual([]);
    else {
      await vi.waitUntil(() => String(told) === String(peers.map(nameOf).sort()), soon);
      // Once all fit, nothing has to be said.
      for (const { member } of others.splice(-5)) await member.close();
      await vi.waitUntil(() => seen === 65 && peers.length === 64, soon);
      await vi.waitUntil(() => told === undefined, soon);
      expect(changes.at(-1)).toEqual({ peers: undefined });
    }
    // Of one that says nothing nothing is made.
    expect(new Set(ofOld)).toEqual(new Set([undefined]));
  },
  60_000,
);

/** Of one node: what it says in its record, and what it writes down, while others come. */
async function followed(names: readonly string[], kept = 64) {
  const redis = memberServers([server.url]);
  const log = new Lines();
  const comes = (name: string): void => {
    const peer = { host: '127.0.0.1', port: 1_000 + ends.length };
    const member = announceNode({ name, peer, events: null }, { redis, leaseMs: 10_000, log });
    ends.push(() => member.close());
  };
  for (const name of names) comes(name);
  let [others, looks] = [0, 0];
  const setOthers: Peers['setOthers'] = (addresses) => {
    others = addresses.length;
    looks++;
    return addresses.slice(0, kept);
  };
  const changes: { readonly atMs: number; readonly peers: readonly string[] | undefined }[] = [];
  const member = {
    change: (part: object) => {
      const { peers } = part as { readonly peers: readonly string[] | undefined };
      changes.push({ atMs: performance.now(), peers });
    },
  };
  const following = followPeers({ name: 'self', redis, leaseMs: 10_000 }, { setOthers }, security, log, member);
  ends.push(() => following.close());
  await vi.waitUntil(() => others === names.length, soon);
  return { redis, log, changes, comes, others: () => others, looks: () => looks };
}

it('names that no record holds are not said, which is one line', async () => {
  const long = (at: number): string => `node-${at}-${'x'.repeat(80)}`;
  const { log, changes, comes, others } = await followed(Array.from({ length: 65 }, (_, at) => long(at)));
  comes(long(65));
  await vi.waitUntil(() => others() === 66, soon);
  expect(log.matching(/this node cannot say which nodes it fetches from/)).toHaveLength(1);
  expect(log.matching(/of \d+ bytes; a record holds 64 of 5000"/)).toHaveLength(1);
  // Before all had come some may have been said.
  expect(changes.filter(({ peers }) => (peers?.length ?? 0) > 60)).toEqual([]);
}, 60_000);

it('how many are no peers is written down when it changes, and what changes soon after another one is said with it', async () => {
  const { redis, log, changes, comes, others, looks } = await followed(['a', 'b'], 1);
  await vi.waitUntil(() => changes.length > 0, soon);
  const names = Array.from({ length: 63 }, (_, at) => `n${at}`);
  for (const [at, name] of names.entries()) {
    comes(name);
    if (at % 10 === 0) await vi.waitUntil(() => others() === at + 3, soon);
  }
  await vi.waitUntil(() => others() === 65, soon);
  const over = /nodes of the list that are no peers/;
  expect(log.matching(over)).toEqual(['info nodes of the list that are no peers {"nodes":65,"maxPeers":64}']);
  // The list changes, and as many as before are no peers.
  const before = looks();
  const member = joinCluster({ name: 'nowhere', redis, leaseMs: 10_000 }, { peer: null, events: null }, log);
  ends.push(() => member.close());
  await vi.waitUntil(() => looks() > before, soon);
  expect(log.matching(over)).toHaveLength(1);
  const pauses = changes.slice(1).map(({ atMs }, at) => atMs - changes[at]!.atMs);
  expect(pauses.filter((ms) => ms < 1_400)).toEqual([]);
}, 60_000);

it('a node says its role, and that it fetches from nobody', async () => {
  const redis = memberServers([server.url]);
  const log = new Lines();
  const where = { arena: { bytes: 16 << 20, dir: '/dev/shm' }, disk: null, clock: systemClock, log: silent };
  const listen = { host: '127.0.0.1', port: 0, dataPort: 0 };
  const peers = { listen, peers: [], security, streams: 2, readLimitMs: 2_000, maxBlocks: 10_000 };
  const only = { ...peers, peers: [{ host: '127.0.0.1', port: 9 }] };
  for (const [name, options] of Object.entries({
    none: { peers: null, role: 'decode' as const },
    listed: { peers },
    static: { peers: only, followPeers: false },
    given: { peers, followPeers: false },
  })) {
    const { peers: its, ...rest } = options;
    const node = await openCacheNode({
      ...{ ...where, socketPath: path.join(folder, `${name}.sock`), dataDir: path.join(folder, name), peers: its },
      membership: { redis, leaseMs: 10_000, name, ...rest },
    });
    ends.push(() => node.close());
  }
  let said: object = {};
  const reader = new MemberReader({
    ...{ redis, pollMs: 50, log, problem: () => {} },
    changed: ({ nodes }) => {
      said = Object.fromEntries(nodes.map(({ name, peers, role }) => [name, [peers, role]]));
    },
  });
  ends.push(() => reader.close());
  await vi.waitUntil(() => Object.keys(said).length === 4, soon);
  expect(said).toMatchObject({ none: [[], 'decode'], static: [undefined, undefined], given: [[], undefined] });
}, 60_000);

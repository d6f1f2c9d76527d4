/** What a peer may ask for and say costs the giving node none of its blocks, and no log full of lines; windows hold. */
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { join } from 'node:path';
import { type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { ArenaMemory } from '../arena/arena-memory.ts';
import { CodecTier, type codecNames } from '../codec/codec-tier.ts';
import { DiskTier } from '../disk/disk-tier.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { maxHashes } from './frames.ts';
import type { PeerLoops } from './peer-loops.ts';
import type { PeerTier } from './peer-tier.ts';
import { fetchingTier, GivingNode, loopsOf, sharedSecret, until } from './testing/peer-pair.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const payloadBytes = 40_000;

let local: TestBench;
let remote: TestBench;
let disk: DiskTier;
let node: GivingNode;
let loops: PeerLoops;
let tier: PeerTier | undefined;
const lines: object[] = [];
beforeEach(async () => {
  local = new TestBench();
  remote = new TestBench(8 << 20, join(local.dir, 'remote'));
  disk = await DiskTier.open({
    ...{ dir: join(remote.dir, 'segments'), capacityBytes: 2 << 20, segmentBytes: 128 << 10 },
    ...{ arena: remote.arena, slots: remote.tier, log: silentLog, io: { backend: 'threads' as const } },
  });
  lines.length = 0;
  const log = { ...silentLog, warn: (fields: object) => lines.push(fields) };
  node = await GivingNode.open(remote, { below: disk, log });
  loops = loopsOf(local, sharedSecret());
});
afterEach(async () => {
  await tier?.close();
  tier = undefined;
  await loops.close();
  await node.close();
  await disk.close();
  remote.dispose();
  local.dispose();
});

async function connected(options: Parameters<typeof fetchingTier>[3] = {}): Promise<PeerTier> {
  const made = fetchingTier(local, options.loops ?? loops, [node.server.port], options);
  tier = made;
  await until('the index is there', () => made.lookup(space, chain) === chain.length);
  await until('streams are up', () => made.stats().detail!.usable_peers === 1);
  return made;
}

it('a slot that is too small for a block below: missing, and the owner keeps its block', async () => {
  await remote.write(disk, space, chain, payloadBytes);
  const one = await connected();
  expect(await local.read(one, space, chain, 1000)).toEqual(chain.map(() => 'missing'));
  expect(disk.lookup(space, chain)).toBe(chain.length);
  expect(disk.stats().corrupt).toBe(0);
  expect(remote.tier.stats().bytes).toBe(0);
});

it.each(['none', 'lz4'] as const)(
  'so it is where nobody has read of it yet what a block takes, with codec %s',
  async (codec) => {
    const below = (name: (typeof codecNames)[number]) =>
      new CodecTier({
        ...{ inner: disk, codec: name, arena: remote.arena, memory: new ArenaMemory(remote.arena, 8 << 20) },
        ...{ slots: remote.tier, nowUs: () => performance.now() * 1000 },
      });
    await remote.write(below(codec), space, chain, payloadBytes);
    await node.close();
    node = await GivingNode.open(remote, { below: below('none') });
    const one = await connected();
    // Below what is stored, and between that and what it holds.
    for (const [from, slotBytes] of [1_000, 8_000].entries()) {
      const some = chain.slice(4 * from, 4 * from + 4);
      expect(await local.read(one, space, some, slotBytes)).toEqual(some.map(() => 'missing'));
    }
    expect(disk.lookup(space, chain)).toBe(chain.length);
  },
);

it('a block that is corrupt below is removed after a hint; one that is sound stays', async () => {
  await remote.write(disk, space, chain, payloadBytes);
  const one = await connected();
  // Its payload begins with the bytes of no other block.
  const slot = remote.filledSlot(space, chain[2]!, payloadBytes);
  const wanted = remote.payloadAt(slot, payloadBytes).subarray(8, 4000);
  remote.tier.free(slot);
  const files = readdirSync(join(remote.dir, 'segments'), { recursive: true, withFileTypes: true });
  const holding = files
    .filter((file) => file.isFile())
    .map((file) => join(file.parentPath, file.name))
    .find((file) => readFileSync(file).includes(wanted))!;
  const bytes = readFileSync(holding);
  bytes[bytes.indexOf(wanted) + headerBytes]! ^= 1;
  writeFileSync(holding, bytes, { flag: 'r+' });
  one.remove(space, [chain[1]!, chain[2]!, chain[3]!], 'corrupt');
  await until('the owner removed it', () => node.server.counts.corrupt === 1);
  // Those after it are looked at, too, before all slots are back.
  await until('the others were looked at', () => remote.tier.stats().bytes === 0);
  expect(disk.lookup(space, chain)).toBe(2);
  expect(disk.lookup(space, chain.slice(3))).toBe(chain.length - 3);
  expect(node.server.counts.corrupt).toBe(1);
});

it('never more than `windowBytes` in flight on a stream', async () => {
  await remote.write(remote.tier, space, chain, payloadBytes);
  const windowBytes = 100_000;
  let peakBytes = 0;
  const inFlight = new Map<number, number>();
  const add = (stream: number, bytes: number): void => {
    inFlight.set(stream, (inFlight.get(stream) ?? 0) + bytes);
    peakBytes = Math.max(peakBytes, inFlight.get(stream)!);
  };
  const watched = new Proxy(loops, {
    get: (target, name: keyof PeerLoops) => {
      if (name !== 'fetch') {
        const value = target[name] as unknown;
        return typeof value === 'function' ? value.bind(target) : value;
      }
      return (...[stream, blocks, indexes, onDone]: Parameters<PeerLoops['fetch']>) => {
        for (const index of indexes) add(stream, blocks.slotBytes[index]!);
        target.fetch(stream, blocks, indexes, (index, result) => {
          add(stream, -blocks.slotBytes[index]!);
          onDone(index, result);
        });
      };
    },
  });
  const one = await connected({ loops: watched, windowBytes });
  const readings = Array.from({ length: 8 }, () => local.read(one, space, chain, payloadBytes));
  for (const statuses of await Promise.all(readings)) expect(statuses).toEqual(chain.map(() => 'ready'));
  expect(peakBytes).toBeGreaterThan(windowBytes / 2);
  expect(peakBytes).toBeLessThanOrEqual(windowBytes);
});

const forAWhile = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 300));

/** The disk below another giving node, with each block's reads counted, and held back. */
async function countedNode(options: Partial<Parameters<typeof GivingNode.open>[1]> = {}, holdBack = forAWhile) {
  const reads = new Map<HashKey, number>();
  const below = new Proxy(disk, {
    get: (target, name: keyof DiskTier) => {
      if (name === 'read') {
        return async (...[namespace, blocks, onDone]: Parameters<DiskTier['read']>) => {
          for (const { hash } of blocks) reads.set(hash, (reads.get(hash) ?? 0) + 1);
          await holdBack();
          return target.read(namespace, blocks, onDone);
        };
      }
      const value = target[name] as unknown;
      return typeof value === 'function' ? value.bind(target) : value;
    },
  });
  const counted = await GivingNode.open(remote, { below, ...options });
  return { counted, reads };
}

it('what several peers ask for at the same time is read from below once', async () => {
  await remote.write(disk, space, chain, payloadBytes);
  const { counted, reads } = await countedNode();
  const ports = [counted.server.port];
  const tiers = [1, 2, 3].map(() => fetchingTier(local, loops, ports));
  await until('all see it', () =>
    tiers.every((each) => each.lookup(space, chain) === chain.length && each.stats().detail!.usable_peers === 1),
  );
  const answers = await Promise.all(tiers.map((each) => local.read(each, space, chain, payloadBytes)));
  expect(answers).toEqual(tiers.map(() => chain.map(() => 'ready')));
  expect([...reads.values()]).toEqual(chain.map(() => 1));
  await until('its slots are back', () => remote.tier.stats().bytes === 0);
  for (const each of tiers) await each.close();
  await counted.close();
});

it('what the node reads itself is not read once more for a peer', async () => {
  await remote.write(disk, space, chain, payloadBytes);
  let asked = 0;
  let arrive = (): void => {};
  const arrived = new Promise<void>((resolve) => {
    arrive = resolve;
  });
  let isArriving = true;
  const arriving = (_: Namespace, hash: HashKey): Promise<void> | undefined => {
    if (hash !== chain[3] || !isArriving) return undefined;
    asked++;
    return arrived;
  };
  const { counted, reads } = await countedNode({ arriving });
  const one = fetchingTier(local, loops, [counted.server.port]);
  await until('it is seen', () => one.lookup(space, chain) === chain.length && one.stats().detail!.usable_peers === 1);
  const reading = local.read(one, space, chain, payloadBytes);
  await until('it was asked for', () => asked === 1);
  await remote.write(remote.tier, space, [chain[3]!], payloadBytes);
  isArriving = false;
  arrive();
  expect(await reading).toEqual(chain.map(() => 'ready'));
  expect([...reads.keys()].sort()).toEqual(chain.filter((_, at) => at !== 3).sort());
  await one.close();
  await counted.close();
});

it("peers' reads from below take an eighth of the arena at most, and those that find no slot wait for one", async () => {
  const many = Array.from({ length: 40 }, (_, i) => hashNamed(`many ${i}`));
  await remote.write(disk, space, many, payloadBytes);
  const own = Array.from({ length: 160 }, (_, i) => hashNamed(`own ${i}`));
  for (const hash of own) await remote.write(remote.tier, space, [hash], payloadBytes);
  const before = remote.tier.stats();
  const node = await GivingNode.open(remote, { below: disk });
  const others = [1, 2].map(() => fetchingTier(local, loops, [node.server.port]));
  for (const each of others)
    await until(
      'it is seen',
      () => each.lookup(space, many) === many.length && each.stats().detail!.usable_peers === 1,
    );
  const statuses = await Promise.all(others.map((each) => local.read(each, space, many, payloadBytes)));
  expect(statuses).toEqual(others.map(() => many.map(() => 'ready')));
  const evicted = remote.tier.stats().evictions - before.evictions;
  expect(evicted * 45_056).toBeLessThanOrEqual((8 << 20) / 8);
  expect(node.server.counts.declined).toBe(0);
  for (const each of others) await each.close();
  await node.close();
});

it('reads from below that do not end cost those behind them half a second, and their connection stays', async () => {
  const many = Array.from({ length: 40 }, (_, i) => hashNamed(`many ${i}`));
  await remote.write(disk, space, many, payloadBytes);
  let goOn = (): void => {};
  const held = new Promise<void>((resolve) => {
    goOn = resolve;
  });
  const { counted, reads } = await countedNode({}, () => held);
  const one = fetchingTier(local, loops, [counted.server.port]);
  await until('it is seen', () => one.lookup(space, many) === many.length && one.stats().detail!.usable_peers === 1);
  const reading = local.read(one, space, many, payloadBytes);
  await until('the others are given up', () => counted.server.counts.declined > 0 && reads.size > 0);
  goOn();
  const statuses = await reading;
  expect(statuses.filter((status) => status === 'ready').length).toBe(reads.size);
  expect(statuses.filter((status) => status === 'failed').length).toBe(many.length - reads.size);
  expect(one.stats().detail!.usable_peers).toBe(1);
  await one.close();
  await counted.close();
});

it('fifty strangers: all are counted, one line of the log tells it', async () => {
  await Promise.all(
    Array.from(
      { length: 50 },
      () =>
        new Promise<void>((resolve) => {
          const socket = connect({ host: '127.0.0.1', port: node.server.port });
          socket.on('error', () => {});
          socket.on('close', () => resolve());
          socket.resume();
          socket.write('GET / HTTP/1.1\r\n\r\n');
        }),
    ),
  );
  await until('all were counted', () => node.server.counts.refused === 50);
  expect(lines.length).toBe(1);
});

it('more is used of a peer in one turn than it can be told of: what is too much is not told, and it stays connected', async () => {
  const doubted = hashNamed('doubted');
  await remote.write(disk, space, [...chain, doubted], payloadBytes);
  const endedPins: string[] = [];
  const endPin = (_: Namespace, ticket: Buffer): void => void endedPins.push(ticket.toString());
  const { counted, reads } = await countedNode({ endPin });
  await node.close();
  node = counted;
  const one = await connected();
  await until('all is seen', () => one.lookup(space, [doubted]) === 1);
  const used = Array.from({ length: maxHashes }, (_, i) => chain[i % chain.length]!);
  const told = Math.ceil((64 << 20) / (32 * maxHashes));
  for (let i = 0; i < told; i++) one.touch(space, used);
  // What is told for more than a block's age is told behind it.
  one.endPin(space, Buffer.from('a ticket of ours'), chain[0]!);
  one.remove(space, [doubted], 'corrupt');
  expect(one.stats().detail!.connected_peers).toBe(1);
  await until('the pin has ended', () => endedPins.length === 1);
  expect(endedPins).toEqual(['a ticket of ours']);
  await until('the giving node has looked', () => reads.get(doubted) === 1);
  expect(await local.read(one, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
  expect(one.lookup(space, chain)).toBe(chain.length);
});

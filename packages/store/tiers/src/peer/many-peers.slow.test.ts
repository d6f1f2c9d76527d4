/** A node in the middle of many: it fetches from each of them, and is there for each of them. */
import { once } from 'node:events';
import { createServer } from 'node:net';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import type { PeerTier } from './peer-tier.ts';
import { fetchingTier, type GivingNode, loopsOf, sharedSecret, until } from './testing/peer-pair.ts';
import { PeerRig } from './testing/peer-rig.ts';

const space = namespaceNamed('one');

let rig: PeerRig;
beforeEach(() => {
  rig = new PeerRig();
});
afterEach(() => rig.end());

it.each([18, 64])(
  '%i peers: what each holds is fetched, of one that leaves nothing any more',
  async (count) => {
    const nodes: GivingNode[] = [];
    for (let i = 0; i < count; i++) nodes.push(await rig.give({}, `node-${i}`));
    for (const [i, { bench }] of nodes.entries())
      await bench.write(bench.tier, space, [hashNamed(i), hashNamed('all')], 20_000);
    const ports = nodes.map(({ server }) => server.port);
    const { tier } = rig.fetchFrom(ports);
    const chain = nodes.map((_, i) => hashNamed(i));
    await until(
      'all are there',
      () => tier.stats().detail!.usable_peers === count && tier.stats().blocks === count + 1,
    );
    expect(await rig.bench.read(tier, space, chain, 20_000)).toEqual(chain.map(() => 'ready'));
    tier.setPeers(ports.slice(0, -1).map((port) => ({ host: '127.0.0.1', port })));
    await until('one has left', () => tier.stats().blocks === count);
    expect(tier.lookup(space, [chain.at(-1)!])).toBe(0);
    expect(tier.lookup(space, [hashNamed('all'), ...chain.slice(0, -1)])).toBe(count);
    tier.checkIntegrity();
  },
  60_000,
);

it('300 nodes come at once to one: all are served, and can fetch', async () => {
  const count = 300;
  const node = await rig.give({ maxStrangers: count }, 'one', undefined, count);
  await node.bench.write(node.bench.tier, space, [hashNamed(0)], 20_000);
  const bench = new TestBench(8 << 20, join(rig.bench.dir, 'others'));
  const loops = loopsOf(bench, sharedSecret());
  const tiers = Array.from({ length: count }, () => fetchingTier(bench, loops, [node.server.port], { streams: 1 }));
  rig.onEnd(async () => {
    for (const tier of tiers) await tier.close();
    await loops.close();
    bench.dispose();
  });
  const isThere = (tier: PeerTier): boolean =>
    tier.lookup(space, [hashNamed(0)]) === 1 && tier.stats().detail!.usable_peers === 1;
  await until('all are there', () => tiers.every(isThere));
  const { peers, refused } = node.server.counts;
  expect([peers, refused, node.loops.refused['too many']]).toEqual([count, 0, 0]);
}, 60_000);

it('blocks can come from a peer, from one that is away for a moment, and from no other node', async () => {
  const [one, other] = [await rig.give({ epoch: 11n }, 'one'), await rig.give({ epoch: 12n }, 'other')];
  const { tier } = rig.fetchFrom([one.server.port, other.server.port], { maxRetryMs: 2_000 });
  // Before they are connected either may be the one.
  expect(tier.mayCome(13n)).toBe(true);
  await until('both are there', () => tier.stats().detail!.connected_peers === 2);
  expect([11n, 12n, 13n].map((epoch) => tier.mayCome(epoch))).toEqual([true, true, false]);
  const { port } = other.server;
  await other.close();
  await until('it has gone', () => tier.stats().detail!.connected_peers === 1);
  expect([11n, 12n, 13n].map((epoch) => tier.mayCome(epoch))).toEqual([true, true, true]);
  await until('it is not waited for any more', () => !tier.mayCome(12n));
  expect([11n, 13n].map((epoch) => tier.mayCome(epoch))).toEqual([true, false]);
  tier.setPeers([{ host: '127.0.0.1', port }]);
  expect(tier.mayCome(11n)).toBe(false);
}, 60_000);

it('while a new peer waits for the place of one that goes, blocks can come from any', async () => {
  const [one, other] = [await rig.give({ epoch: 11n }, 'one'), await rig.give({ epoch: 12n }, 'other')];
  await one.bench.write(one.bench.tier, space, [hashNamed(0)], 20_000);
  // No node listens at these.
  const nobody = Array.from({ length: 63 }, (_, at) => at + 1);
  const { tier } = rig.fetchFrom([one.server.port, ...nobody], { maxRetryMs: 100 });
  await until(
    'one is there, nobody is waited for',
    () => tier.lookup(space, [hashNamed(0)]) === 1 && !tier.mayCome(12n),
  );
  tier.setPeers([...nobody, other.server.port].map((port) => ({ host: '127.0.0.1', port })));
  expect(tier.mayCome(12n)).toBe(true);
  await until('the other is there', () => tier.stats().detail!.connected_peers === 1);
  await until('and nobody else', () => !tier.mayCome(11n));
  expect(tier.mayCome(12n)).toBe(true);
}, 60_000);

it('one that is away for long is tried when somebody asks for what may be there', async () => {
  const at: number[] = [];
  const away = createServer((socket) => {
    at.push(performance.now());
    socket.destroy();
  }).listen(0, '127.0.0.1');
  await once(away, 'listening');
  rig.onEnd(() => away.close());
  const maxRetryMs = 2_000;
  const { tier } = rig.fetchFrom([(away.address() as { port: number }).port], { maxRetryMs });
  await until('it is not waited for any more', () => !tier.mayCome(12n));
  const tries = at.length;
  await until('it was tried again', () => at.length > tries);
  const asked = at.length;
  // By itself after half of the longest pause at least.
  await until('and when somebody asks', () => !tier.mayCome(12n) && at.length >= asked + 3);
  const pauses = at.slice(asked).map((ms, index) => ms - at[asked + index - 1]!);
  expect(Math.max(...pauses)).toBeLessThan(maxRetryMs / 2);
  expect(Math.min(...pauses)).toBeGreaterThan(maxRetryMs / 20);
}, 60_000);

/** A node in the middle of many: it fetches from each of them, and is there for each of them. */
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
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

it('80 nodes come at once to one: all are served', async () => {
  const node = await rig.give();
  await node.bench.write(node.bench.tier, space, [hashNamed(0)], 20_000);
  const bench = new TestBench(8 << 20, join(rig.bench.dir, 'others'));
  const loops = loopsOf(bench, sharedSecret());
  const tiers = Array.from({ length: 80 }, () => fetchingTier(bench, loops, [node.server.port], { streams: 1 }));
  rig.onEnd(async () => {
    for (const tier of tiers) await tier.close();
    await loops.close();
    bench.dispose();
  });
  await until('all are there', () => tiers.every((tier) => tier.lookup(space, [hashNamed(0)]) === 1));
  expect(node.server.counts).toMatchObject({ peers: 80, refused: 0 });
}, 60_000);

it('blocks can come from a peer, from one that is away for a moment, and from no other node', async () => {
  const [one, other] = [await rig.give({ epoch: 11n }, 'one'), await rig.give({ epoch: 12n }, 'other')];
  const { tier } = rig.fetchFrom([one.server.port, other.server.port], { maxRetryMs: 300 });
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

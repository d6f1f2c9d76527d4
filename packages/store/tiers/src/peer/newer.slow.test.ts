/** A newer peer's blocks that this node cannot read: misses, no word of damage to their owner, and they stay with it. */
import { native } from '@kvtier/data-plane';
import { headerBytes } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { newerHeaders, resealed } from '../kit/testing/newer.ts';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { until } from './testing/peer-pair.ts';
import { PeerRig } from './testing/peer-rig.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 4 }, (_, i) => hashNamed(i));
const payloadBytes = 20_000;

let rig: PeerRig;
beforeEach(() => {
  rig = new PeerRig();
});
afterEach(() => rig.end());

it.each(newerHeaders)('a block with %s', async (_, change) => {
  const node = await rig.give({}, 'remote', 2000);
  const { arena, tier: slots } = node.bench;
  await node.bench.write(slots, space, chain, payloadBytes);
  const { slot } = slots.get(space, chain[3]!)!;
  native.arenaWrite(arena, slot, resealed(native.arenaRead(arena, slot, headerBytes), change));
  const { tier } = rig.fetchFrom([node.server.port]);
  await until('the index is there', () => tier.lookup(space, chain) === 4);
  await until('streams are up', () => tier.stats().detail!.usable_peers === 1);
  const statuses = ['ready', 'ready', 'ready', 'missing'];
  expect(await rig.bench.read(tier, space, chain, payloadBytes)).toEqual(statuses);
  expect(tier.stats().corrupt).toBe(0);
  expect(tier.lookup(space, chain)).toBe(3);
  // A hint would have come by then: the owner has said what it was asked for after it. And it would have looked, when it ends.
  expect(await rig.bench.read(tier, space, chain.slice(0, 3), payloadBytes)).toEqual(statuses.slice(0, 3));
  await node.server.close();
  expect(node.server.counts.corrupt).toBe(0);
  expect(slots.lookup(space, chain)).toBe(4);
});

/** What a node's peers are before anybody has said who they are. */
import { silent } from '@kvtier/placement/testing';
import { TestBench } from '@kvtier/tiers/testing';
import { expect, it } from 'vitest';
import { openPeers } from './peers.ts';

it('before the list was read blocks may come from any node; from then on from its nodes', async () => {
  const bench = new TestBench(8 << 20);
  const node = { arena: bench.arena, slots: bench.tier, epoch: 1n, log: silent };
  const security = { encryption: 'none' as const, secrets: [Buffer.alloc(32, 5)] };
  const options = { listen: null, peers: [], security, streams: 1, readLimitMs: 1_000, maxBlocks: 10_000 };
  const [listed, fixed] = [openPeers(options, node, true), openPeers(options, node)];
  expect([listed.mayCome(7n), fixed.mayCome(7n)]).toEqual([true, false]);
  listed.setOthers([]);
  expect(listed.mayCome(7n)).toBe(false);
  for (const peers of [listed, fixed]) {
    await peers.tier.close();
    await peers.close();
  }
  bench.dispose();
});

/** When all of a load is here and verified it has ended, whatever the node has still to say: it may stand still before it does. */
import type { StepResult } from '@kvtier/executor';
import type { ArrivedLoad } from '@kvtier/scheduler';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { chainOf, hashOf } from './testing/memory.ts';
import { ConnectorRig, until } from './testing/rig.ts';

const blocks = 9;
const blockIds = Array.from({ length: blocks }, (_, i) => 50 + i);
let rig: ConnectorRig;

/** A node that announces all of a load and not its end, and does not answer its release: the link still knows the load. */
beforeEach(async () => {
  rig = new ConnectorRig({ loadDeadlineMs: 60_000 });
  await rig.attach();
  for (let i = 0; i < blocks; i++) rig.node.seed(hashOf(1, i));
  rig.node.readyBlocks = blocks;
  rig.node.comes = blocks;
  rig.node.fault = ({ $case }) => ($case === 'release' ? 'silent' : 'none');
});

afterEach(async () => {
  await rig.close();
  expect(rig.node.wrongs).toEqual([]);
});

/** The end is said after all; a second one would be an error of the link. */
async function endLate(): Promise<void> {
  await until(() => rig.node.leases.size === 0, 'the release');
  rig.node.lateEnds.shift()!();
  expect(await rig.connector.stats(), 'an answer behind the end').not.toBeNull();
  expect(rig.connector.counters.sessions).toBe(1);
  expect(rig.connector.counters.reasons).toEqual({}); // no deadline, either
}

it('one that a step imported has ended when that step settles', async () => {
  const order: string[] = [];
  const imported = new Uint8Array(blocks).fill(1);
  const step = async (): Promise<StepResult> => ({ tokenIds: Int32Array.of(1), logits: null, elapsedUs: 1, imported });
  const offers: ArrivedLoad[] = [];
  rig.connector.load(
    'r',
    chainOf(1, blocks),
    0,
    Int32Array.from(blockIds),
    ({ loaded }) => order.push(`ended with ${loaded}`),
    (load) => offers.push(load) > 0,
  );
  await until(() => offers.length === 1, 'the offer');
  await offers[0]!.import(step);
  order.push('step over');
  expect(order).toEqual([`ended with ${blocks}`, 'step over']);
  await endLate();
  expect(order).toHaveLength(2);
});

it('one that was copied ends with its last copy', async () => {
  expect(await rig.load('r', 1, 0, blockIds)).toMatchObject({ loaded: blocks, byTier: { arena: blocks } });
  for (const [i, block] of blockIds.entries()) expect(rig.holds(block, 1, i)).toBe(true);
  await endLate();
});

it('one whose request is gone ends at once, with no further copy, and the node is told', async () => {
  rig.node.fault = () => 'none';
  rig.node.readyBlocks = 3;
  rig.node.comes = 3;
  const load = rig.load('r', 1, 0, blockIds);
  await until(() => rig.holds(52, 1, 2), 'what came');
  rig.endLoad('r', 5); // of what nobody computes
  rig.endLoad('somebody else', 0);
  expect(rig.node.endedLoads).toEqual([]);
  rig.endLoad('r', 0);
  rig.endLoad('r', 0);
  expect(await load).toMatchObject({ loaded: 3 });
  await until(() => rig.node.leases.size === 0, 'the release');
  expect(rig.node.endedLoads).toHaveLength(1);
  expect(rig.connector.counters.reasons).toEqual({ 'load: request ended': 1 });
});

it('one whose request is gone when all has been announced ends with the copies that run', async () => {
  rig.node.fault = () => 'none';
  const offers: ArrivedLoad[] = [];
  const load = rig.load('r', 1, 0, blockIds, (offer) => offers.push(offer) > 0);
  await until(() => offers.length === 1, 'the offer');
  rig.endLoad('r', 0);
  offers[0]!.decline();
  expect(await load).toMatchObject({ loaded: 0 });
  await until(() => rig.node.leases.size === 0, 'the release');
  expect(rig.connector.counters.loadedBlocks).toBe(0);
});

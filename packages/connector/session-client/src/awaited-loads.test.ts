/** Loads of blocks that another engine computes meanwhile, against a scripted node; and what a store says of its blocks. */
import { describe, expect, it, onTestFinished } from 'vitest';
import { AwaitedGroups } from './awaited-groups.ts';
import { partsOf } from './groups.ts';
import type { ConnectorOptions } from './node-connector.ts';
import { FakeExecutor } from './testing/fake-executor.ts';
import { chainOf, hashOf } from './testing/memory.ts';
import { ConnectorRig, until } from './testing/rig.ts';

const ids = (first: number, count: number): number[] => Array.from({ length: count }, (_, i) => first + i);
const long = { stallMs: 60_000, deadlineMs: 60_000 };

async function attached(options: Partial<ConnectorOptions> = {}): Promise<ConnectorRig> {
  const rig = new ConnectorRig(options);
  onTestFinished(async () => {
    await rig.close();
    expect(rig.executor.mapped.size, 'arenas still mapped').toBe(0);
    expect(rig.node.wrongs).toEqual([]);
  });
  await rig.attach();
  return rig;
}

describe('an awaited load', () => {
  it('copies each block as it comes, and asks nobody whether computing is faster', async () => {
    const rig = await attached();
    rig.connector.observePrefill(400, 80_200, 1); // nothing is faster than this engine
    rig.node.seed(hashOf(1, 4));
    const came: number[] = [];
    const onCame = (blocks: number): void => void came.push(blocks);
    const load = rig.load('r', 1, 4, ids(50, 4), undefined, { stallMs: 30_000, deadlineMs: 40_000, onCame });
    for (let i = 0; i < 3; i++) {
      await until(() => rig.holds(50 + i, 1, 4 + i), `block ${i}`);
      expect(rig.holds(50 + i + 1, 1, 4 + i + 1)).toBe(false);
      rig.node.seed(hashOf(1, 4 + i + 1));
    }
    expect(await load).toMatchObject({ loaded: 4, byTier: { arena: 4 }, reason: '' });
    expect(came).toEqual([1, 2, 3]);
    expect(rig.holds(53, 1, 7)).toBe(true);
    await until(() => rig.node.leases.size === 0, 'the release');
    expect(rig.node.endedLoads).toEqual([]);
    expect(rig.connector.counters.reasons).toEqual({});
  });

  it.each([
    [0, 3, 'now, with what is there'],
    [2, 3, 'now: more is there already'],
    [5, 5, 'when so many are there'],
  ])('told to end at %i blocks ends %s', async (blocks, loaded) => {
    const rig = await attached();
    for (let i = 0; i < 3; i++) rig.node.seed(hashOf(1, i));
    const load = rig.load('r', 1, 0, ids(50, 9), undefined, long);
    await until(() => rig.holds(52, 1, 2), 'what is there');
    rig.endLoad('r', blocks);
    rig.endLoad('somebody else', 0);
    if (blocks > 3) for (let i = 3; i < blocks; i++) rig.node.seed(hashOf(1, i));
    expect(await load).toMatchObject({ loaded, reason: 'changed' });
    rig.endLoad('r', 0);
    await until(() => rig.node.leases.size === 0, 'the release');
    expect(rig.node.endedLoads).toHaveLength(1);
    expect(rig.connector.counters.reasons).toEqual({ 'load: changed': 1 });
  });

  it('takes the last word for what it is to wait for', async () => {
    const rig = await attached();
    const load = rig.load('r', 1, 0, ids(50, 4), undefined, long);
    await until(() => rig.node.awaiting.size === 1, 'the load');
    rig.endLoad('r', 2);
    rig.endLoad('r', 99);
    for (let i = 0; i < 4; i++) rig.node.seed(hashOf(1, i));
    expect(await load).toMatchObject({ loaded: 4, reason: '' });
  });

  it('ends when nothing more comes, though the node says nothing', async () => {
    const rig = await attached();
    rig.node.seed(hashOf(1, 0));
    const begin = performance.now();
    const load = rig.load('r', 1, 0, ids(50, 4), undefined, { stallMs: 60, deadlineMs: 60_000 });
    await until(() => rig.node.awaiting.size === 1, 'the load');
    expect([...rig.node.awaiting.values()][0]!.awaitMs).toBe(60);
    expect(await load).toMatchObject({ loaded: 1, reason: 'awaited' });
    expect(performance.now() - begin).toBeGreaterThan(55);
    await until(() => rig.node.leases.size === 0, 'the release');
    expect(rig.node.endedLoads).toHaveLength(1);
  });

  it('ends at its deadline, and with the node, and says why', async () => {
    const rig = await attached();
    const late = await rig.load('a', 1, 0, ids(50, 4), undefined, { stallMs: 60_000, deadlineMs: 20 });
    expect(late).toMatchObject({ loaded: 0, reason: 'deadline' });
    rig.node.seed(hashOf(1, 0));
    const load = rig.load('b', 1, 0, ids(60, 4), undefined, long);
    await until(() => rig.holds(60, 1, 0), 'the first block');
    await rig.node.kill();
    expect(await load).toMatchObject({ loaded: 1, reason: 'disconnected' });
    expect(await rig.load('c', 1, 0, ids(70, 4), undefined, long)).toMatchObject({ loaded: 0, reason: 'no session' });
  });

  it('ends at a block with wrong bytes, and reports it', async () => {
    const rig = await attached();
    rig.node.fault = (body) => (body.$case === 'load' ? 'wrong bytes' : 'none');
    const load = rig.load('r', 1, 0, ids(50, 4), undefined, long);
    rig.node.seed(hashOf(1, 0));
    expect(await load).toMatchObject({ loaded: 0, reason: 'checksum' });
    await until(() => rig.node.corruptReports.length === 1, 'the word of it');
  });
});

describe('a store', () => {
  it('says how many of its blocks the node holds, from the first on, when it has said so', async () => {
    const rig = await attached();
    const settled: number[] = [];
    const busy: boolean[] = [];
    const store = async (chain: number, blocks: number): Promise<number> => {
      const before = settled.length;
      const onSettled = (held: number, isBusy: boolean): void => {
        settled.push(held);
        busy.push(isBusy);
      };
      await rig.store(chain, 0, ids(10, blocks), { onSettled });
      await until(() => settled.length > before, 'the answer');
      return settled.at(-1)!;
    };
    expect(await store(1, 4)).toBe(4);
    expect(await store(1, 6)).toBe(6); // four of them were held
    rig.node.writing.add(hashOf(1, 7).toString('hex'));
    expect(await store(1, 9)).toBe(7);
    expect(busy).toEqual([false, false, true]);
    rig.node.fault = (body) => (body.$case === 'commit' ? 'failure' : 'none');
    expect(await store(2, 3)).toBe(0);
    rig.node.fault = (body) => (body.$case === 'reserve' ? 'failure' : 'none');
    expect(await store(1, 6)).toBe(0);
    await rig.node.kill();
    await until(() => !rig.connector.attached, 'the end of the session');
    expect(await store(1, 6)).toBe(0);
  });
});

it('of a store that is too much at once the rest may be offered again', async () => {
  const rig = await attached({ maxStoreBlocks: 4 });
  const settled: unknown[] = [];
  await rig.store(1, 0, ids(10, 6), { onSettled: (...said) => settled.push(said) });
  await until(() => settled.length === 1, 'the answer');
  expect(settled).toEqual([[4, true, false]]);
});

it.each([
  ['one attention group', [0]],
  ['groups that all end together', [0, 0, 5]],
])('of %s that is ended while nothing is copied calls back once, and not from inside', async (_, windows) => {
  const executor = new FakeExecutor(64);
  const groups = windows.map((windowTokens, layer) => ({ windowTokens, layers: [layer] }));
  Object.assign(executor, { kv: { ...executor.kv, groups } });
  const namespace = windows.map((_, group) => new Uint8Array(32).fill(group));
  const rig = await attached({ executor, namespace });
  const load = rig.load('r', 1, 0, ids(1, 2 * windows.length), undefined, long);
  await until(() => rig.node.log.filter((kind) => kind === 'load').length === windows.length, 'the loads');
  rig.endLoad('r', 0);
  expect(await load).toMatchObject({ loaded: 0, reason: 'changed' });
  expect(rig.connector.counters.loads).toBe(1);
});

describe('several attention groups', () => {
  const full = Number.POSITIVE_INFINITY;
  /** Eight blocks; the window of the second group begins at the seventh. */
  const parts = partsOf(Int32Array.of(...ids(1, 8), ...[0, 0, 0, 0, 0, 0], 9, 10, ...ids(11, 8)), 3);
  const outcome = (loaded: number, reason = '') => ({ loaded, reason, tiers: [], withStep: false, isGivenUp: false });
  const begin = () => {
    const groups = new AwaitedGroups([full, 2, full], 8);
    const limits: number[][] = [[], [], []];
    for (const [i, part] of parts.entries()) groups.add(part, { limit: (blocks) => limits[i]!.push(blocks) });
    return { groups, limits };
  };

  it('see a stall where all is seen; a window waits as long as the load may take', () => {
    const { groups } = begin();
    expect(parts.map((part) => groups.patienceOf(part, { stallMs: 1, deadlineMs: 9 }).stallMs)).toEqual([1, 9, 1]);
  });

  it('do not wait for each other beyond where one of them ended', () => {
    const { groups, limits } = begin();
    groups.ended(parts[0]!, outcome(8));
    expect(limits).toEqual([[], [], []]);
    groups.ended(parts[2]!, outcome(3, 'awaited'));
    expect(limits).toEqual([[], [0], []]);
    groups.ended(parts[1]!, outcome(0, 'changed'));
    expect(groups.reason).toBe('awaited');
  });

  it('are told together to wait for less: a window is of no use then', () => {
    const { groups, limits } = begin();
    groups.limit(5);
    expect(limits).toEqual([[5], [0], [5]]);
    groups.limit(99);
    expect(limits).toEqual([
      [5, 8],
      [0, 2],
      [5, 8],
    ]);
  });
});

it('hashes of an awaited load are those of its blocks', async () => {
  const rig = await attached();
  const seen: Buffer[] = [];
  rig.node.fault = (body) => {
    if (body.$case === 'load') seen.push(body.value.hashes);
    return 'none';
  };
  for (let i = 2; i < 5; i++) rig.node.seed(hashOf(7, i));
  expect(await rig.load('r', 7, 2, ids(50, 3), undefined, long)).toMatchObject({ loaded: 3 });
  expect(seen).toEqual([chainOf(7, 5).subarray(16)]);
});

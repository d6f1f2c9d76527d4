/** The connector against a scripted node: what it does when all goes well, and for each way in which a node misbehaves. */
import { KvError } from '@kvtier/errors';
import type { StepResult } from '@kvtier/executor';
import type { ArrivedLoad, LoadResult } from '@kvtier/scheduler';
import { afterEach, expect, it } from 'vitest';
import { FakeExecutor } from './testing/fake-executor.ts';
import { ManualTimers } from './testing/manual-timers.ts';
import { chainOf, contentOf, hashOf } from './testing/memory.ts';
import { ConnectorRig, fastTimers, until } from './testing/rig.ts';
import { realTimers } from './timers.ts';

let rig: ConnectorRig;
afterEach(async () => {
  await rig.close();
  expect(rig.executor.mapped.size, 'arenas still mapped').toBe(0);
  expect(rig.node.wrongs).toEqual([]);
});

const ids = (first: number, count: number): number[] => Array.from({ length: count }, (_, i) => first + i);
const reasons = () => rig.connector.counters.reasons;

/** A session; from here on the clock goes as the test says. */
async function attachedByHand(): Promise<ManualTimers> {
  const timers = new ManualTimers();
  rig = new ConnectorRig({ loadDeadlineMs: 60_000, timers });
  await rig.attachByHand(timers);
  return timers;
}

it('what was stored is matched and loaded, byte for byte', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  expect(rig.node.attaches[0]).toMatchObject({ protocol: 1, payloadBytes: 32n, blockTokens: 4, hashBytes: 8 });
  expect(rig.node.attaches[0]!.previousSession).toHaveLength(0);
  await rig.store(1, 0, ids(10, 6));
  await rig.store(1, 6, ids(16, 4));
  await until(() => rig.connector.counters.storedBlocks === 10, 'the commits');
  expect(rig.node.reserved.size).toBe(0);

  expect(rig.connector.match('r', chainOf(1, 12), 0)).toEqual({ state: 'pending' });
  expect(await rig.matched('r', chainOf(1, 12), 0)).toBe(10);
  expect(rig.wakes).toBe(1);
  expect(rig.connector.match('r', chainOf(1, 12), 4)).toEqual({ state: 'known', blocks: 6 });
  const result = await rig.load('r', 1, 4, ids(100, 6));
  expect(result).toMatchObject({ loaded: 6, byTier: { arena: 6 } });
  for (let i = 0; i < 6; i++) expect(rig.holds(100 + i, 1, 4 + i)).toBe(true);
  await until(() => rig.node.leases.size === 0, 'the release');
  expect(rig.connector.counters).toMatchObject({ lookups: 1, loads: 1, loadedBlocks: 6, loadedBytes: 192, stores: 2 });
  expect(reasons()).toEqual({});
});

it('token ids are said to a node that wants them, and are not asked for otherwise', async () => {
  rig = new ConnectorRig();
  let asked = 0;
  const tokens = (first: number, end: number): Int32Array => {
    asked++;
    return Int32Array.from({ length: (end - first) * 4 }, (_, i) => first * 4 + i);
  };
  await rig.attach();
  await rig.store(1, 0, ids(10, 2), { tokens });
  expect([asked, rig.node.saidTokens]).toEqual([0, [undefined]]);
  await rig.node.kill();
  await until(() => !rig.connector.attached, 'the end of the session');
  rig.node.wantsTokenIds = true;
  await rig.attach();
  await rig.store(1, 0, ids(10, 2), { tokens });
  await rig.store(1, 2, ids(12, 1), { tokens });
  await rig.store(1, 3, ids(13, 1)); // of a request whose hashes depend on more
  const words = (from: number, to: number): Buffer =>
    Buffer.from(Uint32Array.from({ length: to - from }, (_, i) => from + i).buffer);
  expect(rig.node.saidTokens.slice(1)).toEqual([words(0, 8), words(8, 12), undefined]);
});

it('token ids are not said of a group with a window: what lies before a piece of it is not known to the node', async () => {
  const executor = new FakeExecutor(256);
  const groups = [0, 5].map((windowTokens, layer) => ({ windowTokens, layers: [layer] }));
  Object.assign(executor, { kv: { ...executor.kv, layers: 2, groups } });
  const namespace = [7, 8].map((fill) => new Uint8Array(32).fill(fill));
  rig = new ConnectorRig({ executor, namespace });
  rig.node.wantsTokenIds = true;
  await rig.attach();
  // Row by row; the window's first block is behind it.
  for (const [id, block] of [
    [10, 0],
    [11, 1],
    [21, 1],
  ] as const)
    executor.blocks[id]!.set(contentOf(hashOf(1, block)));
  const tokens = (first: number, end: number): Int32Array => new Int32Array((end - first) * 4);
  await new Promise<void>((resolve) => {
    rig.connector.store(chainOf(1, 2), 0, Int32Array.from([10, 11, 0, 21]), resolve, { tokens });
  });
  expect(rig.node.saidTokens.map((said) => said?.length).toSorted()).toEqual([32, undefined]);
});

it('without a node nothing is matched, loaded or stored, and nothing waits', async () => {
  rig = new ConnectorRig();
  expect(rig.connector.attached).toBe(false);
  expect(rig.connector.match('r', chainOf(1, 4), 0)).toEqual({ state: 'known', blocks: 0 });
  expect(await rig.load('r', 1, 0, [1, 2])).toEqual({ loaded: 0, byTier: {}, elapsedUs: 0 });
  await rig.store(1, 0, [1, 2]);
  expect(await rig.connector.stats()).toBeNull();
  expect(reasons()).toEqual({ 'load: no session': 1, 'store: no session': 2 });
});

it('a node that is not there yet is worth a warning after 30 s, one that was there at once', async () => {
  const begin = performance.now();
  rig = new ConnectorRig({ timers: fastTimers(20) });
  await until(() => rig.warnings.length > 0, 'a warning', 10_000); // it comes after 1.5 s, where nobody keeps us waiting
  expect((performance.now() - begin) * 20).toBeGreaterThan(29_900);
  expect(rig.warnings).toEqual(['no session with the cache node yet']);
  await rig.attach();
  await rig.node.kill();
  await until(() => rig.warnings.length === 3, 'news of the loss');
  expect(rig.warnings.slice(1)).toEqual(['the session ended', 'no session with the cache node yet']);
});

it('a start in which the node comes second warns of nothing', async () => {
  rig = new ConnectorRig();
  await new Promise((resolve) => setTimeout(resolve, 100)); // several attempts
  await rig.attach();
  expect(rig.warnings).toEqual([]);
});

it('a hint to prefetch is passed on, and nobody waits for its answer', async () => {
  rig = new ConnectorRig({ tenant: 'a', ttlSeconds: 60 });
  rig.connector.prefetch('r', chainOf(1, 4), 0); // no session: nothing happens
  await rig.attach();
  expect(rig.node.attaches[0]).toMatchObject({ tenant: 'a', ttlSeconds: 60 });
  for (const [i, first] of [1, 4, 0, 0].entries()) rig.connector.prefetch(`r${i}`, chainOf(1, 4), first); // 4: nothing is left of the chain
  await until(() => reasons()['prefetch: session_limit'] === 1, 'the answers');
  expect(rig.connector.counters.prefetches).toBe(2);
  expect(rig.node.prefetches.map((hashes) => hashes.length / 8)).toEqual([3, 4, 4]);
  expect(rig.node.prefetches[0]).toEqual(chainOf(1, 4).subarray(8));
  rig.node.fault = () => 'failure';
  rig.connector.prefetch('x', chainOf(1, 4), 0);
  await until(() => reasons()['prefetch: capacity'] === 1, 'the refusal');
});

it('a request that is gone takes its prefetch with it; one that loads asks for its blocks itself', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  rig.connector.prefetch('aborted', chainOf(1, 4), 0);
  rig.connector.prefetch('loads', chainOf(2, 4), 0);
  await rig.load('loads', 2, 0, [1]);
  rig.connector.forget('loads');
  rig.connector.forget('aborted');
  rig.connector.forget('aborted');
  rig.connector.forget('never asked');
  await until(() => rig.connector.counters.cancelledPrefetchBlocks === 4, 'the cancellation');
  expect(rig.node.cancelledPrefetches).toEqual([chainOf(1, 4)]);
  // Ids are a connection's own: what went over another one is not cancelled over this one.
  rig.connector.prefetch('before', chainOf(3, 4), 0);
  await until(() => rig.node.prefetches.length === 3, 'the hint');
  await rig.node.kill();
  await until(() => !rig.connector.attached, 'the end of the session');
  await rig.attach();
  rig.connector.forget('before');
  await rig.connector.stats(); // a round trip: what was sent before it has arrived
  expect(rig.node.cancelledPrefetches).toHaveLength(1);
});

it('a lookup without an answer is a miss at its deadline; a forgotten one wakes nobody', async () => {
  rig = new ConnectorRig({ lookupDeadlineMs: 20 });
  await rig.attach();
  rig.node.seed(hashOf(1, 0));
  rig.node.fault = () => 'silent';
  expect(await rig.matched('r', chainOf(1, 1), 0)).toBe(0);
  expect(rig.wakes).toBe(1);
  rig.connector.match('gone', chainOf(1, 1), 0);
  rig.connector.forget('gone');
  await until(() => rig.connector.counters.reasons['lookup: deadline'] === 2, 'the second deadline');
  expect(rig.wakes).toBe(1);
});

it('a hit that would be slower than computing is left alone', async () => {
  await attachedByHand();
  for (let i = 0; i < 8; i++) rig.node.seed(hashOf(1, i));
  rig.node.spans = () => [
    { tier: 'arena', count: 3 },
    { tier: 'disk', count: 5 },
  ];
  rig.node.estimatedUs = 100_000;
  rig.connector.observePrefill(400, 80_200, 400_000); // 4,000 µs per block
  expect(await rig.matched('r', chainOf(1, 8), 0)).toBe(3);
  expect(rig.connector.match('r', chainOf(1, 8), 0)).toEqual({ state: 'known', blocks: 3 });
  expect(reasons()).toEqual({ 'lookup: slower than computing': 5 });
  expect(rig.passed).toEqual([{ byTier: { disk: 5 }, us: 100_000 }]);
});

it('a load that falls behind computing is given up; what had come is used', async () => {
  const timers = await attachedByHand();
  for (let i = 0; i < 40; i++) rig.node.seed(hashOf(1, i));
  rig.node.spans = () => [{ tier: 'peer', count: 40 }];
  rig.node.estimatedUs = 1_000;
  rig.node.comes = 6;
  rig.node.readyBlocks = 6; // at once: between two frames it may be judged
  rig.connector.observePrefill(400, 80_200, 1_000_000); // 400 ms for all
  expect(await rig.matched('r', chainOf(1, 40), 0)).toBe(40);
  const loading = rig.load('r', 1, 0, ids(50, 40));
  await until(() => rig.holds(55, 1, 5), 'what comes');
  await timers.pass(300); // and not the deadline
  expect((await loading).loaded).toBe(6);
  expect(reasons()).toEqual({ 'load: slower than computing': 1 });
  await until(() => rig.node.leases.size === 0, 'the release');
});

it('beside a head nobody waits for the load: it is judged when that is computed, and what it took moves the next one', async () => {
  const timers = await attachedByHand();
  for (let i = 0; i < 40; i++) rig.node.seed(hashOf(1, i));
  rig.node.spans = () => [{ tier: 'peer', count: 40 }];
  rig.node.estimatedUs = 40_000; // as long as computing them takes
  rig.node.comes = 3;
  rig.connector.observePrefill(400, 80_200, 100_000);
  const planned = async (id: string): Promise<{ blocks: number; head?: number }> => {
    await rig.matched(id, chainOf(1, 40), 0);
    return rig.connector.match(id, chainOf(1, 40), 0, true) as { blocks: number; head?: number };
  };
  const { blocks, head = 0 } = await planned('r');
  expect([blocks + head, head > 15 && head < 25]).toEqual([40, true]);
  let looks = 0;
  const hasHead = (): boolean => ++looks < 20;
  const loading = rig.load('r', 1, head, ids(50, blocks), undefined, undefined, hasHead);
  await until(() => rig.holds(52, 1, head + 2), 'what comes');
  await timers.pass(1_000);
  expect([(await loading).loaded, looks]).toEqual([3, 20]);
  expect(reasons()).toMatchObject({ 'load: slower than computing': 1 });
  expect((await planned('next')).head).toBeGreaterThan(head);
});

it('a block with wrong bytes ends the prefix and is reported', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  for (let i = 0; i < 9; i++) rig.node.seed(hashOf(1, i));
  rig.node.fault = (body) => (body.$case === 'load' ? 'wrong bytes' : 'none');
  const result = await rig.load('r', 1, 0, ids(50, 9));
  expect(result.loaded).toBe(4);
  for (let i = 0; i < 4; i++) expect(rig.holds(50 + i, 1, i)).toBe(true);
  await until(() => rig.node.corruptReports.length === 1, 'the node told of a corrupt block');
  expect(rig.node.corruptReports[0]!.corrupt).toEqual([4]);
  expect(reasons()).toEqual({ 'load: checksum': 1 });
});

it('a load that lies in the arena as a whole is offered to a step, and ends with it', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  for (let i = 0; i < 9; i++) rig.node.seed(hashOf(1, i));
  rig.node.readyBlocks = 9;
  const step = (good: Uint8Array | null) => async (): Promise<StepResult> => {
    expect(rig.node.leases.size).toBe(1); // held until the step has ended
    return { tokenIds: Int32Array.of(1), logits: null, elapsedUs: 1, imported: good };
  };
  const offered = async (id: string, decide: (load: ArrivedLoad) => void): Promise<LoadResult> => {
    const result = await rig.load(id, 1, 0, ids(50, 9), (load) => {
      queueMicrotask(() => decide(load));
      return true;
    });
    await until(() => rig.node.leases.size === 0, 'the release');
    return result;
  };
  const good = new Uint8Array(9).fill(1);
  let seen: ArrivedLoad | undefined;
  const whole = await offered('whole', (load) => {
    seen = load;
    void load.import(step(good));
  });
  expect(whole).toMatchObject({ loaded: 9, byTier: { arena: 9 } });
  expect(seen!.blocks.blockIds).toEqual(Int32Array.from(ids(50, 9)));
  expect(seen!.blocks.offsets).toHaveLength(9);
  expect(rig.holds(50, 1, 0)).toBe(false); // nothing was copied
  const bad = good.slice();
  bad[4] = 0;
  expect((await offered('bad', (load) => void load.import(step(bad)))).loaded).toBe(4);
  expect(rig.node.corruptReports).toMatchObject([{ corrupt: [4] }]);
  expect((await offered('none', (load) => void load.import(step(null)))).loaded).toBe(0);
  const failing = (): Promise<StepResult> => Promise.reject(new KvError('GPU', 'the device is gone'));
  const failed = await offered('failed', (load) => load.import(failing).catch(() => {}));
  expect(failed.loaded).toBe(0);
  expect(rig.node.corruptReports).toHaveLength(1);
  expect(reasons()).toEqual({ 'load: checksum': 1, 'load: not imported': 1, 'load: gpu': 1 });
  expect((await offered('declined', (load) => load.decline())).loaded).toBe(9);
  for (let i = 0; i < 9; i++) expect(rig.holds(50 + i, 1, i)).toBe(true);
  const refused = await rig.load('refused', 1, 0, ids(70, 9), () => false);
  expect(refused.loaded).toBe(9);
  expect(rig.holds(78, 1, 8)).toBe(true);
  // In pieces: what came first is on its way when the last comes.
  rig.node.readyBlocks = 4;
  expect((await rig.load('pieces', 1, 0, ids(80, 9), () => expect.unreachable())).loaded).toBe(9);
});

it('an offer outlives its session: a step may not import it, and declined it ends with nothing', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  for (let i = 0; i < 4; i++) rig.node.seed(hashOf(1, i));
  rig.node.readyBlocks = 4;
  const offers: ArrivedLoad[] = [];
  const result = rig.load('r', 1, 0, ids(50, 4), (load) => offers.push(load) === 1);
  await until(() => offers.length === 1, 'the offer');
  expect(offers[0]!.live).toBe(true);
  await rig.node.kill();
  await until(() => !offers[0]!.live, 'the end of the session');
  offers[0]!.decline();
  expect((await result).loaded).toBe(0);
});

it('a load keeps what is contiguous when the node stops in the middle; its late lease is released', async () => {
  rig = new ConnectorRig({ loadDeadlineMs: 500 });
  await rig.attach();
  for (let i = 0; i < 5; i++) rig.node.seed(hashOf(1, i));
  expect((await rig.load('r', 1, 0, ids(50, 8))).loaded).toBe(5);
  expect(reasons()).toEqual({ 'load: missing': 1 });
  rig.node.stopped = true;
  const result = await rig.load('r', 1, 0, ids(60, 5));
  expect(result.loaded).toBe(0);
  // By its own limit, long before anybody takes the session for ended.
  expect(reasons()).toEqual({ 'load: missing': 1, 'load: deadline': 1 });
  rig.node.go();
  await until(() => rig.node.log.filter((name) => name === 'release').length === 2, 'the release');
  expect(rig.node.leases.size).toBe(0);
});

it('a node that dies in the middle: what was being copied counts, once it is verified', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  for (let i = 0; i < 6; i++) rig.node.seed(hashOf(1, i));
  rig.node.readyBlocks = 2;
  const gates: (() => void)[] = [];
  rig.executor.beforeCopy = () => new Promise((resolve) => gates.push(resolve));
  const loading = rig.load('r', 1, 0, ids(50, 6));
  await until(() => gates.length === 2, 'two copies');
  await rig.node.kill();
  await until(() => !rig.connector.attached, 'the end of the session');
  await rig.node.start();
  expect(rig.node.attaches, 'no new session while copies run').toHaveLength(1);
  expect(rig.executor.mapped.size, 'the arena stays mapped while copies run').toBe(1);
  for (const open of gates) open();
  expect((await loading).loaded).toBe(4);
  for (let i = 0; i < 4; i++) expect(rig.holds(50 + i, 1, i)).toBe(true);
  expect(reasons()).toEqual({ 'load: disconnected': 1 });
  await rig.attached();
});

it('the session comes back, with another arena after a restart, and names the one before', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  const { epoch } = rig.connector;
  expect(epoch).toBeTypeOf('bigint');
  await rig.store(1, 0, [1, 2]);
  await rig.node.kill();
  await until(() => !rig.connector.attached, 'the end of the session');
  expect(rig.connector.epoch).toBeUndefined();
  await rig.attach();
  expect(rig.connector.epoch).not.toBe(epoch);
  expect(rig.node.attaches[1]!.previousSession).toEqual(rig.node.sessions[0]);
  expect(rig.executor.mapped.size).toBe(1);
  expect(await rig.matched('r', chainOf(1, 2), 0)).toBe(0);
  await rig.store(1, 0, [1, 2]);
  await until(() => rig.connector.counters.storedBlocks >= 2, 'the commit');
  expect(await rig.matched('s', chainOf(1, 2), 0)).toBe(2);
  expect(rig.connector.counters.sessions).toBe(2);
});

it('a silent node is left alone, and asked again as soon as it answers', async () => {
  rig = new ConnectorRig({ lookupDeadlineMs: 200 });
  await rig.attach();
  rig.node.seed(hashOf(1, 0));
  rig.node.stopped = true;
  await rig.matched('a', chainOf(1, 1), 0);
  await rig.matched('b', chainOf(1, 1), 0);
  expect(rig.connector.suspended).toBe(true);
  expect(rig.connector.attached).toBe(false);
  expect(rig.connector.match('c', chainOf(1, 1), 0)).toEqual({ state: 'known', blocks: 0 });
  await rig.store(1, 0, [1]);
  expect(rig.connector.counters.lookups).toBe(2);
  rig.node.go();
  await rig.attached();
  expect(await rig.matched('d', chainOf(1, 1), 0)).toBe(1);
  expect(rig.connector.counters).toMatchObject({ suspensions: 1, sessions: 1 });
});

it('a copy that fails aborts the store, and nothing is committed', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  rig.executor.beforeCopy = () => Promise.reject(new Error('IO: no'));
  await rig.store(1, 0, [1, 2, 3]);
  await until(() => rig.node.log.includes('abort'), 'the abort');
  await until(() => rig.node.reserved.size === 0, 'the slots');
  expect(rig.node.log).not.toContain('commit');
  expect(reasons()).toEqual({ 'store: io': 3 });
});

it('a Reserve that is answered too late is aborted', async () => {
  rig = new ConnectorRig({ timers: fastTimers(20) });
  await rig.attach();
  rig.node.stopped = true;
  const settled: unknown[] = [];
  await rig.store(1, 0, [1, 2], { onSettled: (...said) => settled.push(said) });
  expect(reasons()).toEqual({ 'store: deadline': 2 });
  await until(() => settled.length > 0, 'the answer');
  expect(settled).toEqual([[0, true, true]]); // it may be offered again
  rig.node.go();
  await until(() => rig.node.log.includes('abort'), 'the abort');
  expect(rig.node.reserved.size).toBe(0);
});

it('stores beyond the bound keep the first blocks of the chain and release the rest', async () => {
  rig = new ConnectorRig({ maxStoreBlocks: 4 });
  await rig.attach();
  await Promise.all([rig.store(1, 0, ids(1, 6)), rig.store(2, 0, ids(11, 3))]);
  await until(() => rig.connector.storingBlocks === 0, 'the commits');
  expect(rig.node.held.size).toBe(4);
  expect(reasons()).toEqual({ 'store: too many in flight': 5 });
});

it.each(['garbage', 'foreign', 'wrong order', 'wrong offset', 'other epoch', 'hang up'] as const)(
  'a node that answers a load with %s loses the session, not the request',
  async (fault) => {
    rig = new ConnectorRig();
    await rig.attach();
    for (let i = 0; i < 4; i++) rig.node.seed(hashOf(1, i));
    rig.node.fault = (body) => (body.$case === 'load' ? fault : 'none');
    expect((await rig.load('r', 1, 0, ids(50, 4))).loaded).toBe(0);
    rig.node.fault = () => 'none';
    await until(() => rig.connector.counters.sessions === 2, 'another session');
    await rig.attached();
    expect((await rig.load('r', 1, 0, ids(50, 4))).loaded).toBe(4);
  },
);

it.each(['failure', 'garbage', 'hang up', 'silent'] as const)(
  'an Attach that ends with %s is tried again',
  async (fault) => {
    rig = new ConnectorRig({ timers: fastTimers(20) });
    let refusals = 0;
    rig.node.attachFault = () => (refusals++ < 3 ? fault : 'none');
    await rig.attach();
    expect(refusals).toBe(4);
    expect(new Set(rig.warnings).size, rig.warnings.join()).toBeLessThanOrEqual(1);
  },
);

it('an arena that cannot be mapped is no session; it is tried again', async () => {
  rig = new ConnectorRig();
  const { attachArena } = rig.executor;
  let attempts = 0;
  rig.executor.attachArena = (...args) => {
    if (attempts++ < 2) throw new Error('SETUP: the arena is of another node');
    return attachArena.apply(rig.executor, args);
  };
  await rig.attach();
  expect(attempts).toBe(3);
  expect(rig.warnings.length, 'two reasons, each told once: no node yet, no arena').toBeLessThanOrEqual(2);
});

it('a match is remembered, asked anew when it is stale or too short, and cut after a load that fell short', async () => {
  let laterMs = 0;
  rig = new ConnectorRig({ timers: { ...realTimers, nowMs: () => realTimers.nowMs() + laterMs } });
  await rig.attach();
  for (let i = 0; i < 6; i++) rig.node.seed(hashOf(1, i));
  const hashes = chainOf(1, 8);
  const lookups = () => rig.connector.counters.lookups;
  expect(await rig.matched('r', hashes, 2)).toBe(4);
  expect(await rig.matched('r', hashes, 5)).toBe(1);
  expect(await rig.matched('r', hashes, 8)).toBe(0);
  expect(lookups()).toBe(1);
  expect(await rig.matched('r', hashes, 0)).toBe(6); // the engine lost its own blocks
  expect(lookups()).toBe(2);
  rig.node.fault = (body) => (body.$case === 'load' ? 'failure' : 'none');
  expect((await rig.load('r', 1, 0, ids(50, 6))).loaded).toBe(0);
  expect(await rig.matched('r', hashes, 0)).toBe(0); // not the same again
  expect(lookups()).toBe(2);
  laterMs = 6_000;
  rig.node.fault = () => 'none';
  const match = () => rig.connector.match('r', hashes, 0);
  rig.connector.renew?.('r', hashes); // asked anew, it answers as before until that is known
  expect(match()).toEqual({ state: 'known', blocks: 0 });
  await until(() => (match() as { blocks?: number }).blocks === 6, 'the new answer');
  expect(lookups()).toBe(3);
  expect((await rig.load('r', 1, 0, ids(50, 6))).loaded).toBe(6);
  expect(await rig.matched('r', hashes, 0)).toBe(6); // e.g. preempted: asked anew
  expect(lookups()).toBe(4);
  expect(reasons()).toEqual({ 'load: capacity': 1 });
});

it('a connection that stays silent is dropped for another one', async () => {
  rig = new ConnectorRig({ timers: fastTimers(100), lookupDeadlineMs: 100 });
  await rig.attach();
  rig.node.fault = () => 'silent';
  await rig.matched('a', chainOf(1, 1), 0);
  await rig.matched('b', chainOf(1, 1), 0);
  expect(rig.connector.suspended).toBe(true);
  await until(() => rig.connector.counters.sessions === 2, 'another session');
  await rig.attached();
});

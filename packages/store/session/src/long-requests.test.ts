/** Requests about many blocks: no turn is theirs alone, their session's requests keep their order, and their session may end meanwhile. */
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { packed, type RawClient } from './testing/raw-client.ts';
import { ServedBench } from './testing/served-bench.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };
/** Time for a small request, or for a step or two of a long one. */
const shortTurns = { turnMs: 0.2 };

let rig: ServedBench;
beforeEach(() => {
  rig = new ServedBench();
  rig.storeLimits = { maxReservedBytes: 1e6, maxPinnedBytes: 1e6, maxLeasedBytes: 1e6, maxWriteDownBytes: 1e6 };
});
afterEach(() => rig.close());

const noDisk = { plans: { disk: { write: 'none' } } } as const;
const root = Buffer.alloc(0);
/** Of so many steps that others have their say between them. */
const many = 16_384;
const reserve = (client: RawClient, name: string, count: number) =>
  client.call({ $case: 'reserve', value: { parent: root, hashes: packed(name, count) } }, 'reserved');
const checksumsOf = (offsets: readonly bigint[]): bigint[] => offsets.map(() => 1n << 60n);

it('of any size that a request may have, none takes a turn of 50 ms', async () => {
  // The watch over turns is the judge (test/setup/turns.ts).
  const count = 32_768;
  await rig.start({}, 2 * count, noDisk);
  const client = await rig.attached();
  const { offsets } = await reserve(client, 'x', count);
  await client.call({ $case: 'commit', value: { offsets, checksums: checksumsOf(offsets) } }, 'done');
  await reserve(client, 'x', count);
  const pin = { hashes: packed('x', count), ttlMs: 60_000, ticket: Buffer.alloc(16, 1) };
  expect(await client.call({ $case: 'pin', value: pin }, 'done')).toEqual({ count });
  expect(await client.call({ $case: 'unpin', value: { hashes: packed('x', count) } }, 'done')).toEqual({ count });
  const { offsets: unused } = await reserve(client, 'y', count);
  expect(await client.call({ $case: 'abort', value: { offsets: unused } }, 'done')).toEqual({ count });
  expect(rig.bench.arena.busySlots).toBe(0);
});

it('of as many blocks as a ticket may have, no end of its pin takes a turn of 50 ms', async () => {
  const count = 65_536;
  await rig.start({}, 2 * count, noDisk);
  const [client, other] = [await rig.attached(), await rig.attached()];
  for (const name of ['x', 'y']) {
    const { offsets } = await reserve(client, name, count);
    await client.call({ $case: 'commit', value: { offsets, checksums: checksumsOf(offsets) } }, 'done');
  }
  const ticket = Buffer.alloc(16, 1);
  const pin = (name: string, ticket: Buffer) =>
    client.call({ $case: 'pin', value: { hashes: packed(name, count), ttlMs: 60_000, ticket } }, 'done');
  const pinned = (): number => rig.bench.store.stats().counters['arena.pinned_blocks']!;
  expect(await pin('x', ticket)).toEqual({ count });
  expect(await pin('y', ticket)).toEqual({ count });
  expect(pinned()).toBe(count);
  const shown = await other.call({ $case: 'endPin', value: { ticket, hash: packed('y', 1) } }, 'done');
  expect(shown).toEqual({ count });
  await vi.waitUntil(() => pinned() === 0, patience);
  expect(await pin('x', Buffer.alloc(16, 2))).toEqual({ count });
  rig.bench.clock.advance(60_000);
  expect(pinned()).toBeGreaterThan(count / 2); // most of them are let go in turns to come
  await vi.waitUntil(() => pinned() === 0, patience);
  expect(await pin('x', Buffer.alloc(16, 3))).toEqual({ count });
  await client.end();
  await vi.waitUntil(() => rig.server!.sessions === 1 && pinned() === 0, patience);
  expect(rig.bench.clock.pending).toBeLessThanOrEqual(1); // what notes the uses of blocks
});

it('others are answered meanwhile, and the session’s own requests come after it', async () => {
  await rig.start(shortTurns, 2 * many, noDisk);
  const [long, other] = [await rig.attached(), await rig.attached()];
  const { offsets } = await reserve(long, 'x', many);
  const commit = long.send({ $case: 'commit', value: { offsets, checksums: checksumsOf(offsets) } });
  const own = long.send({ $case: 'lookup', value: { hashes: packed('x', many) } });
  const held: number[] = [];
  while (!long.answers.some(({ id }) => id === commit)) {
    const { tiers } = await other.call({ $case: 'stats', value: {} }, 'stats');
    held.push(Number(tiers[0]!.blocks));
  }
  expect(await long.answer(commit, 'done')).toEqual({ count: many });
  expect((await long.answer(own, 'lookup')).held).toBe(many);
  expect(held.filter((count) => count > 0 && count < many).length).toBeGreaterThan(1);
});

it('others are answered while it is looked up what is held of a chain with gaps', async () => {
  await rig.start(shortTurns, 2 * many, noDisk);
  const [long, other] = [await rig.attached(), await rig.attached()];
  const { offsets } = await reserve(long, 'x', many / 2);
  await long.call({ $case: 'commit', value: { offsets, checksums: checksumsOf(offsets) } }, 'done');
  const asked = long.send({ $case: 'lookup', value: { hashes: packed('x', many), gaps: true } });
  let meanwhile = 0;
  for (; !long.answers.some(({ id }) => id === asked); meanwhile++)
    await other.call({ $case: 'stats', value: {} }, 'stats');
  const spans = [
    { tier: 'arena', count: many / 2 },
    { tier: '', count: many / 2 },
  ];
  expect(await long.answer(asked, 'lookup')).toMatchObject({ held: many / 2, spans });
  expect(meanwhile).toBeGreaterThan(10);
});

it('a prefetch passes over what is there already in turns', async () => {
  await rig.start({}, 2 * many, noDisk);
  const client = await rig.attached();
  const { offsets } = await reserve(client, 'x', many);
  await client.call({ $case: 'commit', value: { offsets, checksums: checksumsOf(offsets) } }, 'done');
  const { counters } = rig.bench.store;
  const passedOver = (): number => counters.get('prefetch.blocks.already');
  const ask = () => client.call({ $case: 'prefetch', value: { hashes: packed('x', many) } }, 'prefetching');
  expect(await ask()).toEqual({ accepted: true, reason: '' });
  const ofOneTurn = 1_024;
  expect(passedOver()).toBe(ofOneTurn);
  expect(await ask()).toEqual({ accepted: true, reason: '' }); // whoever else asks has his share of later turns
  expect(passedOver()).toBe(ofOneTurn);
  for (let turn = 2; turn <= (2 * many) / ofOneTurn; turn++) {
    rig.bench.clock.advance(0);
    expect(passedOver()).toBe(turn * ofOneTurn);
  }
  rig.bench.clock.advance(0);
  expect([passedOver(), rig.bench.store.stats().counters['prefetch.unused_bytes']]).toEqual([2 * many, 0]);
});

it.each(['reserve', 'commit', 'pin'] as const)(
  'a session that ends in the midst of its %s leaves nothing',
  async (what) => {
    await rig.start(shortTurns, 2 * many, noDisk);
    const [client, next] = [await rig.attached(), await rig.attached()];
    const { offsets } = await reserve(client, 'x', many);
    const commit = { $case: 'commit' as const, value: { offsets, checksums: checksumsOf(offsets) } };
    const { counters, arena } = { ...rig.bench, counters: rig.bench.store.counters };
    if (what !== 'commit') await client.call(commit, 'done');
    const before = counters.get('reserve.reserved');
    const isAmid = (): boolean => {
      if (what === 'commit') return arena.stats().blocks > 0 && counters.get('commit.blocks') === 0;
      if (what === 'pin') return rig.bench.store.stats().counters['arena.pinned_blocks']! > 0;
      return counters.get('reserve.reserved') > before;
    };
    if (what === 'reserve') client.send({ $case: 'reserve', value: { parent: root, hashes: packed('y', many) } });
    else if (what === 'commit') client.send(commit);
    else client.send({ $case: 'pin', value: { hashes: packed('x', many), ttlMs: 60_000 } });
    while (!isAmid()) await new Promise(setImmediate);
    // It ends as its process says that its copies have ended.
    await rig.attached(client.id);
    await client.ended;
    await vi.waitUntil(() => rig.server!.sessions === 2, patience);
    expect([arena.busySlots, rig.server!.quarantined]).toEqual([0, 0]);
    expect(client.answers).toEqual([]);
    rig.bench.store.checkIntegrity();
    const { status } = await reserve(next, 'z', many);
    expect(new Set(status).size).toBe(1);
  },
);

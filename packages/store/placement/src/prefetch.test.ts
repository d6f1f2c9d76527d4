/** What prefetches bring: its bound, what they pin meanwhile, and what becomes of it. */
import { expect, it } from 'vitest';
import { Bench, type BlockWriter, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');

function ended(engine: BlockWriter, id: bigint): [number, string | undefined] {
  const view = engine.loads.get(id)!;
  return [view.loaded, view.reason];
}

it('a prefetch is bounded by what nobody has used yet, and its blocks count as used by the load that takes them', async () => {
  const bench = new Bench(20, { maxPrefetchedBytes: 3 });
  const engine = bench.engine();
  engine.put(chain('old', 20)); // the arena is full
  bench.disk.put(n, chain('x', 6));
  await bench.answerAll('write', 'stored');
  engine.holdings.prefetch(1n, chain('x', 6));
  await bench.answerAll('read', 'ready');
  const { counters } = bench.store;
  expect(bench.arena.lookup(n, chain('x', 6))).toBe(3);
  expect(counters.get('prefetch.refused.budget')).toBe(3);
  expect(engine.holdings.prefetch(2n, chain('x', 6))).toEqual({ accepted: false, reason: 'budget' });
  const id = engine.load(chain('x', 3));
  await settled();
  expect(ended(engine, id)).toEqual([3, '']);
  expect(counters.get('prefetch.blocks.used')).toBe(3);
  expect(bench.store.stats().counters['prefetch.unused_bytes']).toBe(0);
  expect(engine.holdings.prefetch(2n, chain('x', 6)).accepted).toBe(true);
  await bench.answerAll('read', 'ready');
  expect(bench.arena.lookup(n, chain('x', 6))).toBe(6);
  expect(counters.get('prefetch.blocks.already')).toBe(3);
});

it('never ends for good where the arena has room: what was brought first takes from nobody, and counts no more', async () => {
  const bench = new Bench(8, { maxPrefetchedBytes: 2 });
  const engine = bench.engine();
  const { counters } = bench.store;
  for (let request = 0; request < 4; request++) {
    const hashes = chain(`r${request}.`, 2);
    bench.disk.put(n, hashes);
    expect(engine.holdings.prefetch(BigInt(request), hashes)).toEqual({ accepted: true, reason: '' });
    await bench.answerAll('read', 'ready'); // and nobody loads it
    expect(bench.arena.lookup(n, hashes)).toBe(2);
    expect(bench.store.stats().counters['prefetch.unused_bytes']).toBe(2);
  }
  bench.disk.put(n, chain('x', 2));
  expect(engine.holdings.prefetch(4n, chain('x', 2))).toEqual({ accepted: false, reason: 'budget' }); // it is full now
  expect(counters.get('prefetch.blocks.forgotten')).toBe(6);
  for (const request of [0, 3]) engine.load(chain(`r${request}.`, 2));
  await settled();
  expect([counters.get('prefetch.blocks.used'), counters.get('prefetch.blocks.wasted')]).toEqual([2, 0]);
  expect(engine.holdings.prefetch(4n, chain('x', 2)).accepted).toBe(true);
  bench.store.checkIntegrity();
});

it('pins no more than may be unused, though the arena has room, and its reads come one by one or hang', async () => {
  const bench = new Bench(16, { maxPrefetchedBytes: 3, maxFetchBytes: 1, fetchBatchBytes: 1 });
  const engine = bench.engine();
  bench.disk.put(n, chain('x', 40));
  expect(engine.holdings.prefetch(1n, chain('x', 40))).toEqual({ accepted: true, reason: '' });
  const pinned: number[] = [];
  for (let block = 0; block < 13; block++) {
    bench.answer('read', 'ready');
    await settled();
    pinned.push(bench.store.stats().counters['arena.pinned_blocks']!);
  }
  // The third one is on its way when the next finds no room: that ends the prefetch, which lets its blocks go.
  expect(pinned).toEqual([1, 2, ...Array(11).fill(0)]);
  expect(bench.store.stats().counters).toMatchObject({ 'prefetch.unused_bytes': 3, 'prefetch.refused.budget': 37 });
  // The next one takes the room of what was let go.
  expect(engine.holdings.prefetch(2n, chain('x', 37, 3))).toEqual({ accepted: true, reason: '' });
  bench.answer('read', 'ready');
  await settled();
  expect(bench.store.stats().counters).toMatchObject({ 'arena.pinned_blocks': 1, 'prefetch.unused_bytes': 2 });
  expect(engine.put(chain('y', 14))).toEqual(Array(14).fill('reserved')); // one is pinned, one is on its way
  await bench.answerAll('read', 'ready');
  await bench.answerAll('write', 'stored');
  expect(bench.arena.busySlots).toBe(0);
});

it('lets go of what is used while it goes on', async () => {
  const bench = new Bench(16, { maxPrefetchedBytes: 3, maxFetchBytes: 1, fetchBatchBytes: 1 });
  const engine = bench.engine();
  bench.disk.put(n, chain('x', 12));
  engine.holdings.prefetch(1n, chain('x', 12));
  const pinned: number[] = [];
  for (const hash of chain('x', 11)) {
    bench.answer('read', 'ready');
    await settled();
    const id = engine.load([hash]);
    await settled();
    engine.release(id);
    pinned.push(bench.store.stats().counters['arena.pinned_blocks']!);
  }
  expect(pinned).toEqual(Array(11).fill(0));
  expect(bench.store.stats().counters).toMatchObject({ 'prefetch.blocks.used': 11, 'prefetch.unused_bytes': 1 });
  await bench.answerAll('read', 'ready');
  expect(bench.store.stats().counters).toMatchObject({ 'arena.pinned_blocks': 0, 'prefetch.unused_bytes': 1 });
  expect(bench.arena.busySlots).toBe(0);
});

it('what it pins takes its place until it is let go of, though its time ends', async () => {
  const bench = new Bench(16, { maxPrefetchedBytes: 4, maxFetchBytes: 4, fetchBatchBytes: 1 });
  const engine = bench.engine();
  bench.disk.put(n, chain('x', 1), 1, 10);
  bench.disk.put(n, chain('x', 1, 1));
  engine.holdings.prefetch(1n, chain('x', 2));
  bench.answer('read', 'ready');
  await settled();
  bench.clock.advance(10_000);
  expect([bench.arena.lookup(n, chain('x', 1)), bench.arena.busySlots]).toEqual([0, 2]);
  expect(bench.store.stats().counters['prefetch.unused_bytes']).toBe(2);
  bench.answer('read', 'ready');
  await settled();
  const { counters } = bench.store.stats();
  expect([counters['prefetch.unused_bytes'], counters['prefetch.blocks.wasted']]).toEqual([1, 1]);
  expect([bench.arena.lookup(n, chain('x', 1, 1)), bench.arena.busySlots]).toEqual([1, 0]);
});

it('one whose tenant has a quota of the arena counts all that it brought, as its room is its own', async () => {
  const bench = new Bench(8, { maxPrefetchedBytes: 2 }, { quotas: { t: { arena: 6 } } });
  const engine = bench.engine('n', { tenant: 't' });
  bench.disk.put(n, chain('x', 4));
  engine.holdings.prefetch(1n, chain('x', 2));
  await bench.answerAll('read', 'ready');
  expect(engine.holdings.prefetch(2n, chain('x', 4))).toEqual({ accepted: false, reason: 'budget' });
});

it('shares its read with a load that comes later, takes no pinned block, and ends when it is cancelled', async () => {
  const bench = new Bench(4, { maxPrefetchedBytes: 4, maxFetchBytes: 4, fetchBatchBytes: 1 });
  bench.disk.put(n, chain('x', 9));
  const engine = bench.engine();
  engine.holdings.prefetch(1n, chain('x', 9));
  expect(bench.disk.jobs.length).toBe(2);
  const id = engine.load(chain('x', 1));
  expect(bench.store.counters.get('load.blocks.shared_read')).toBe(1);
  expect(engine.holdings.cancelPrefetch(1n)).toBe(7);
  expect(engine.holdings.cancelPrefetch(1n)).toBe(0);
  await bench.answerAll('read', 'ready');
  expect(ended(engine, id)).toEqual([1, '']);
  expect(bench.arena.lookup(n, chain('x', 9))).toBe(2);
  expect(bench.store.stats().counters['prefetch.unused_bytes']).toBe(1);
  const leased = engine.load(chain('x', 2));
  await settled();
  bench.disk.put(n, chain('y', 4));
  engine.holdings.prefetch(2n, chain('y', 4));
  await bench.answerAll('read', 'ready');
  engine.checkLeases();
  expect(engine.loads.get(leased)!.blocks.length).toBe(2);
  expect(bench.arena.lookup(n, chain('y', 4))).toBe(2);
  expect(bench.store.counters.get('prefetch.failed.capacity')).toBe(1);
});

it('ends with its session; the number of them is bounded; an id is used once', async () => {
  const bench = new Bench(20, { maxPrefetches: 1, maxFetchBytes: 2, fetchBatchBytes: 1, maxPrefetchedBytes: 9 });
  bench.disk.put(n, chain('x', 9));
  const engine = bench.engine();
  engine.holdings.prefetch(1n, chain('x', 9));
  expect(engine.holdings.prefetch(2n, chain('x', 9))).toEqual({ accepted: false, reason: 'session_limit' });
  expect(() => engine.holdings.prefetch(1n, [])).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
  engine.holdings.disconnect();
  await bench.answerAll('read', 'ready');
  expect(bench.arena.lookup(n, chain('x', 9))).toBe(1);
  expect(bench.arena.busySlots).toBe(0);
  engine.holdings.end();
});

it.each(['is over', 'is cancelled', 'loses its session'])(
  'lets its blocks go over several turns when it %s',
  async (how) => {
    const bench = new Bench(20, { unpinBatchBlocks: 2, maxPrefetchedBytes: 9 });
    bench.disk.put(n, chain('x', 9));
    const engine = bench.engine();
    const pinned = () => bench.store.stats().counters['arena.pinned_blocks'];
    engine.holdings.prefetch(1n, chain('x', how === 'is over' ? 8 : 9));
    for (let block = 0; block < 8; block++) bench.answer('read', 'ready');
    if (how === 'is cancelled') engine.holdings.cancelPrefetch(1n);
    else if (how === 'loses its session') engine.holdings.disconnect();
    const left = [pinned()];
    while (pinned()! > 0) {
      await settled();
      left.push(pinned());
    }
    expect(left).toEqual([6, 4, 2, 0]);
  },
);

it('a prefetched block that is evicted unused is counted as wasted', async () => {
  const bench = new Bench(2, { maxPrefetchedBytes: 2 });
  bench.disk.put(n, chain('x', 2));
  const engine = bench.engine();
  engine.holdings.prefetch(1n, chain('x', 2));
  await bench.answerAll('read', 'ready');
  engine.put(chain('y', 1));
  expect(bench.store.counters.get('prefetch.blocks.wasted')).toBe(1);
  expect(bench.store.stats().counters['prefetch.unused_bytes']).toBe(1);
});

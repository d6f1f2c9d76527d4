/** Times to live of sessions: what a node serves and keeps, whatever is on its way when a block's second comes. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { Bench, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');
const x = chain('x', 1);
const hour = 3_600_000;

describe('what is on its way when the second comes', () => {
  it.each(['disk', 'redis'])('a write-down to %s is removed again when it ends', async (name) => {
    const bench = new Bench(8, {}, { lower: [name] });
    const engine = bench.engine('n', { ttlS: 10 });
    engine.put(x);
    await settled();
    bench.clock.advance(11_000); // the write is in flight, the block leaves
    await bench.answerAll('write', 'stored');
    bench.clock.advance(0);
    expect([bench.disk.lookup(n, x), engine.lookup(x).held]).toEqual([0, 0]);
    bench.clock.advance(hour);
    expect(engine.lookup(x).held).toBe(0);
    expect([bench.arena.stats().blocks, bench.arena.busySlots]).toEqual([0, 0]);
    bench.store.checkIntegrity();
  });

  it.each(['disk', 'redis'])('a fetch from %s ends as a miss, and nothing of it is kept', async (name) => {
    const bench = new Bench(8, {}, { lower: [name] });
    bench.disk.put(n, x, 1, 10);
    const engine = bench.engine();
    const id = engine.load(x, 60_000);
    await settled();
    bench.clock.advance(10_000);
    bench.answer('read', 'ready');
    await settled();
    expect([engine.loads.get(id)!.loaded, engine.loads.get(id)!.reason]).toEqual([0, 'missing']);
    expect([bench.arena.stats().blocks, bench.disk.lookup(n, x), bench.arena.busySlots]).toEqual([0, 0, 0]);
    bench.store.checkIntegrity();
  });

  it('a write-down that waits is not made any more', async () => {
    const bench = new Bench(8, { writeDownsIdle: 1, writeDownBatchBytes: 1 });
    const engine = bench.engine('n', { ttlS: 10 });
    engine.put(chain('x', 2));
    await settled();
    bench.clock.advance(11_000);
    await bench.answerAll('write', 'stored');
    expect(bench.disk.lookup(n, chain('x', 2, 1))).toBe(0);
    expect(bench.store.counters.get('writedown.disk.stored')).toBe(1);
  });
});

describe('the end of a block is in the object', () => {
  it('so it is kept by a node that starts again, and after the disk was away', async () => {
    const bench = new Bench(8);
    bench.disk.put(n, x, 1, 10); // what an earlier life wrote
    const engine = bench.engine();
    expect(engine.lookup(x).held).toBe(1);
    bench.clock.advance(10_000);
    expect([engine.lookup(x).held, bench.disk.lookup(n, x)]).toEqual([0, 0]);
    bench.disk.put(n, chain('y', 1), 1, 5); // it was over when the disk came back
    bench.clock.advance(0);
    expect([engine.lookup(chain('y', 1)).held, bench.disk.lookup(n, chain('y', 1))]).toEqual([0, 0]);
  });

  it('and goes along to where it is brought', async () => {
    const bench = new Bench(8, {}, { lower: ['disk', 'redis'] });
    const redis = bench.lower[1]!;
    redis.put(n, x, 1, 10);
    const engine = bench.engine();
    const id = engine.load(x);
    await settled();
    bench.answer('read', 'ready', redis);
    await bench.answerAll('write', 'stored'); // promoted to the disk
    engine.release(id);
    expect([bench.arena.lookup(n, x), bench.disk.endOf(n, x[0]!)]).toEqual([1, 10]);
    bench.clock.advance(10_000);
    expect([bench.arena.lookup(n, x), bench.disk.lookup(n, x)]).toEqual([0, 0]);
  });
});

describe('what others share', () => {
  it('is not removed when it may be another object: one that a session without a time to live has made', async () => {
    const bench = new Bench(8, {}, { lower: ['redis'] });
    const engine = bench.engine('n', { ttlS: 10 });
    engine.put(x);
    await settled();
    bench.disk.put(n, x); // another node was faster
    bench.answer('write', 'refused');
    await settled();
    bench.clock.advance(10_000);
    expect([bench.arena.lookup(n, x), bench.disk.endOf(n, x[0]!)]).toEqual([0, 0]);
    const id = engine.load(x);
    await settled();
    bench.answer('read', 'ready');
    await settled();
    expect(engine.loads.get(id)!.loaded).toBe(1);
    bench.store.checkIntegrity();
  });

  it('is found out by the object itself, and removed then', async () => {
    const bench = new Bench(8, {}, { lower: ['redis'] });
    bench.disk.put(n, x, 1, 10);
    bench.clock.advance(10_000);
    const engine = bench.engine();
    const id = engine.load(x);
    await settled();
    bench.answer('read', 'ready');
    await settled();
    expect([engine.loads.get(id)!.reason, bench.disk.lookup(n, x)]).toEqual(['missing', 0]);
    expect(bench.store.counters.get('load.expired.redis')).toBe(1);
  });
});

it('a wall clock that is put right changes what is served at once, and nothing goes too early', async () => {
  const bench = new Bench(8);
  const engine = bench.engine('n', { ttlS: 10 });
  engine.put(x);
  await bench.answerAll('write', 'stored');
  bench.clock.wallAheadMs = 20_000;
  expect(engine.lookup(x).held).toBe(0);
  bench.clock.wallAheadMs = -5_000;
  bench.clock.advance(12_000);
  expect([engine.lookup(x).held, bench.disk.lookup(n, x)]).toEqual([1, 1]);
  bench.clock.advance(3_000);
  expect([engine.lookup(x).held, bench.disk.lookup(n, x)]).toEqual([0, 0]);
  expect(bench.clock.pending).toBe(0);
});

it('a random life: nothing is served or kept after its end, and nothing that has time is lost', async () => {
  const names = chain('x', 6);
  const step = fc.record({
    act: fc.constantFrom('put', 'put', 'load', 'answer', 'answer', 'advance', 'release', 'other'),
    name: fc.nat(5),
    ttlS: fc.constantFrom(0, 1, 2, 5),
    tier: fc.nat(1),
    ms: fc.constantFrom(0, 300, 1_000, 2_500),
  });
  let expired = 0;
  await fc.assert(
    fc.asyncProperty(fc.array(step, { minLength: 20, maxLength: 80 }), async (life) => {
      const bench = new Bench(40, { touchBatchBlocks: 2 }, { lower: ['disk', 'redis'] });
      const engines = [0, 1, 2, 5].map((ttlS) => bench.engine('n', { ttlS }));
      const reader = engines[0]!;
      const [disk, redis] = [bench.lower[0]!, bench.lower[1]!];
      const open: bigint[] = [];
      const isOver = (end: number): boolean => end !== 0 && end * 1000 <= bench.clock.wallMs();
      /** What must still be held: by whom it was made, and until when. */
      const kept = new Map<string, number>();
      for (const { act, name, ttlS, tier, ms } of life) {
        const hash = names[name]!;
        const at = [disk, redis][tier]!;
        if (act === 'put') {
          const [status] = engines.find((_, i) => [0, 1, 2, 5][i] === ttlS)!.put([hash]);
          const end = ttlS === 0 ? 0 : Math.floor(bench.clock.wallMs() / 1000) + ttlS;
          if (status === 'reserved') kept.set(hash, end);
        } else if (act === 'other') {
          // Another node writes it, without an end or with one.
          if (redis.endOf(n, hash) === undefined)
            redis.put(n, [hash], 1, ttlS === 0 ? 0 : Math.floor(bench.clock.wallMs() / 1000) + ttlS);
        } else if (act === 'load') open.push(reader.load([hash], 60_000));
        else if (act === 'release' && open.length > 0) {
          const id = open.shift()!;
          reader.release(id);
        } else if (act === 'answer') {
          if (!bench.answer('write', 'stored', at)) bench.answer('read', 'ready', at);
          await settled();
        } else bench.clock.advance(ms);
        // Turns of the batches: two blocks each.
        for (let turn = 0; turn < 10; turn++) bench.clock.advance(0);
        await settled();
        for (const each of names) {
          const ends = [bench.arena.get(n, each)?.expiresS, disk.endOf(n, each)].filter((end) => end !== undefined);
          expect(ends.filter(isOver), 'kept on this node after its end').toEqual([]);
          const shared = redis.endOf(n, each);
          const anyLeft = ends.length > 0 || shared !== undefined;
          if (!anyLeft) expect(reader.lookup([each]).held).toBe(0);
          const end = kept.get(each);
          if (end !== undefined && isOver(end)) {
            kept.delete(each);
            expired++;
          } else if (
            end !== undefined &&
            [...ends, ...(shared === undefined ? [] : [shared])].every((e) => e === end)
          ) {
            expect(anyLeft, 'lost before its end').toBe(true);
          }
        }
        bench.store.checkIntegrity();
      }
    }),
    { numRuns: 40 },
  );
  expect(expired).toBeGreaterThan(5); // from 40 to 90
});

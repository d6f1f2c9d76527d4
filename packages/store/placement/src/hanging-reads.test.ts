/** A read that is not answered for so long that its tier counts as empty: what becomes of its block, and of those who wait for it. */
import { describe, expect, it } from 'vitest';
import { Bench, type BenchOptions, type BlockWriter, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');
const unwritten = {
  lower: ['disk', 's3'],
  plans: { disk: { write: 'none' as const }, s3: { write: 'none' as const } },
};

function ended(engine: BlockWriter, id: bigint): [number, string | undefined] {
  const view = engine.loads.get(id)!;
  return [view.loaded, view.reason];
}

describe('a read that hangs', () => {
  /** Block x0, of which the disk does not bring the bytes for so long that it counts as empty. */
  async function hanging(options: BenchOptions) {
    const bench = new Bench(8, { stuckReadMs: 100 }, options);
    for (const tier of bench.lower) tier.put(n, chain('x', 1));
    const first = bench.engine();
    const id = first.load(chain('x', 1), 5_000);
    bench.clock.advance(101);
    return { bench, first, id, next: bench.engine(), s3: bench.lower[1]! };
  }

  /** All of it is given back, whatever came of it. */
  function nothing(bench: Bench): void {
    const { counters } = bench.store.stats();
    expect([counters['fetch.inflight_bytes'], bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0, 0]);
    bench.store.checkIntegrity();
  }

  it('is not waited for where another tier holds the block, by anybody any more', async () => {
    const { bench, first, id, next, s3 } = await hanging(unwritten);
    expect(next.lookup(chain('x', 1)).spans).toEqual([{ tier: 's3', count: 1 }]);
    const other = next.load(chain('x', 1), 5_000);
    const third = next.load(chain('x', 1), 5_000); // joins it
    expect(s3.jobs.map(({ hashes }) => hashes)).toEqual([['x0']]);
    bench.answer('read', 'ready', s3);
    await settled();
    expect([ended(first, id), ended(next, other), ended(next, third)]).toEqual([
      [1, ''],
      [1, ''],
      [1, ''],
    ]);
    expect(next.loads.get(other)!.tiers).toEqual(['s3']);
    expect(bench.store.counters.get('load.retried.s3')).toBe(1);
    bench.answer('read', 'ready'); // it comes after all
    await settled();
    for (const engine of [first, next]) engine.checkLeases();
    first.release(id);
    for (const each of [other, third]) next.release(each);
    nothing(bench);
  });

  it.each(['ready', 'failed'] as const)(
    'and is faster than the other tier all the same, serves all; that one is "%s"',
    async (answer) => {
      const { bench, first, id, next, s3 } = await hanging(unwritten);
      const other = next.load(chain('x', 1), 5_000);
      bench.answer('read', 'ready');
      await settled();
      expect([ended(first, id), ended(next, other)]).toEqual([
        [1, ''],
        [1, ''],
      ]);
      bench.answer('read', answer, s3);
      await settled();
      for (const engine of [first, next]) engine.checkLeases();
      first.release(id);
      next.release(other);
      nothing(bench);
    },
  );

  it('and fails in the end, takes nothing from the read that took its place', async () => {
    const { bench, first, id, next, s3 } = await hanging(unwritten);
    const other = next.load(chain('x', 1), 5_000);
    bench.answer('read', 'failed');
    await settled();
    expect(next.put(chain('x', 1))).toEqual(['held']);
    bench.answer('read', 'ready', s3);
    await settled();
    expect([ended(first, id), ended(next, other)]).toEqual([
      [1, ''],
      [1, ''],
    ]);
    first.release(id);
    next.release(other);
    nothing(bench);
  });

  it('keeps nobody from writing the block', async () => {
    const { bench, next } = await hanging({ plans: { disk: { write: 'none' } } });
    expect(next.lookup(chain('x', 1)).held).toBe(0);
    expect(next.put(chain('x', 2))).toEqual(['reserved', 'reserved']);
    const id = next.load(chain('x', 2));
    await settled();
    expect(ended(next, id)).toEqual([2, '']);
    bench.answer('read', 'ready');
    await settled();
    next.checkLeases();
    expect(next.lookup(chain('x', 2)).held).toBe(2);
    expect(bench.store.stats().counters['fetch.inflight_bytes']).toBe(0);
  });
});

/** Several tiers under one store: failover, shares, breakers. */
import { describe, expect, it } from 'vitest';
import { Bench, type BlockWriter, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');
const two = { lower: ['disk', 's3'] };
const unwritten = { ...two, plans: { disk: { write: 'none' as const }, s3: { write: 'none' as const } } };

function ended(engine: BlockWriter, id: bigint): [number, string | undefined] {
  const view = engine.loads.get(id)!;
  return [view.loaded, view.reason];
}

describe('one index over all tiers', () => {
  it('a lookup names the fastest tier of each block, and estimates by the slowest that is needed', () => {
    const bench = new Bench(8, {}, unwritten);
    const [disk, s3] = bench.lower as [typeof bench.disk, typeof bench.disk];
    const engine = bench.engine();
    engine.put(chain('x', 2));
    disk.put(n, chain('x', 3));
    s3.put(n, chain('x', 5));
    const { held, spans, estimatedUs } = engine.lookup(chain('x', 6));
    expect([held, spans]).toEqual([
      5,
      [
        { tier: 'arena', count: 2 },
        { tier: 'disk', count: 1 },
        { tier: 's3', count: 2 },
      ],
    ]);
    expect(estimatedUs).toBeGreaterThan(0);
    const [arena, ...lower] = bench.store.stats().tiers;
    expect([arena, ...lower].map((tier) => [tier!.hits, tier!.misses])).toEqual([
      [2, 4],
      [1, 3],
      [2, 1],
    ]);
    s3.remove(n, chain('x', 1, 3));
    expect(engine.lookup(chain('x', 6)).held).toBe(3);
    bench.store.checkIntegrity();
  });

  it('a block that a lookup asked for and no tier gave is a miss of each, however soon the prefix ends', () => {
    const bench = new Bench(8, {}, unwritten);
    const [disk, s3] = bench.lower as [typeof bench.disk, typeof bench.disk];
    const engine = bench.engine();
    engine.put(chain('x', 4));
    disk.put(n, chain('x', 10));
    s3.put(n, chain('x', 5, 50)); // behind the gap: of no use to this lookup
    expect(engine.lookup(chain('x', 100)).held).toBe(10);
    const figures = bench.store.stats().tiers.map(({ hits, misses }) => [hits, misses]);
    expect(figures).toEqual([
      [4, 96],
      [6, 90],
      [0, 90],
    ]);
    expect(bench.store.counters.get('lookup.blocks.asked')).toBe(100);
  });
});

describe('a read that fails', () => {
  it.each(['failed', 'missing', 'corrupt'] as const)(
    'with "%s" is tried at the next tier that holds the block',
    async (answer) => {
      const bench = new Bench(8, {}, unwritten);
      const [disk, s3] = bench.lower as [typeof bench.disk, typeof bench.disk];
      disk.put(n, chain('x', 3));
      s3.put(n, chain('x', 3));
      const engine = bench.engine();
      const id = engine.load(chain('x', 3));
      bench.answer('read', 'ready');
      bench.answer('read', answer);
      bench.answer('read', 'ready');
      await settled();
      expect(engine.loads.get(id)!.blocks.length).toBe(1);
      expect(s3.jobs.map(({ hashes }) => hashes)).toEqual([['x1']]);
      bench.answer('read', 'ready', s3);
      await settled();
      expect(ended(engine, id)).toEqual([3, '']);
      expect(engine.loads.get(id)!.tiers).toEqual(['disk', 's3', 'disk']);
      engine.checkLeases();
      expect(bench.store.counters.get('load.retried.s3')).toBe(1);
      engine.release(id);
      expect(bench.arena.busySlots).toBe(0);
      bench.store.checkIntegrity();
    },
  );

  it('ends the prefix when the last tier has failed, and is not tried for one who has gone', async () => {
    const bench = new Bench(8, {}, unwritten);
    const [disk, s3] = bench.lower as [typeof bench.disk, typeof bench.disk];
    disk.put(n, chain('x', 1));
    s3.put(n, chain('x', 1));
    const engine = bench.engine();
    const id = engine.load(chain('x', 1));
    bench.answer('read', 'failed');
    await settled();
    bench.answer('read', 'missing', s3);
    await settled();
    expect(ended(engine, id)).toEqual([0, 'missing']);
    const late = engine.load(chain('x', 1), 50);
    bench.clock.advance(50);
    bench.answer('read', 'failed');
    await settled();
    expect(ended(engine, late)).toEqual([0, 'deadline']);
    expect(s3.jobs).toEqual([]);
    expect(bench.arena.busySlots).toBe(0);
  });
});

it('a read that a tier breaks off gives its slots back when no byte of it can arrive any more, and not before', async () => {
  const bench = new Bench(4, { brokenReadMs: 60_000 }, { plans: { disk: { write: 'none' } } });
  bench.disk.put(n, chain('x', 3));
  const engine = bench.engine();
  let slots: readonly number[] = [];
  bench.disk.read = async (_, blocks, onDone) => {
    slots = blocks.map(({ slot }) => slot);
    bench.arena.content.set(slots[0]!, 'nx0');
    bench.arena.headers.set(slots[0]!, {
      hash: chain('x', 1)[0]!,
      parent: null,
      tokenCount: 16,
      payloadBytes: 1,
      checksum: 0n,
    });
    onDone(0, 'ready');
    throw new Error('a defect');
  };
  const id = engine.load(chain('x', 3));
  await settled();
  expect(ended(engine, id)).toEqual([1, 'tier']);
  engine.release(id);
  expect(engine.put(chain('y', 4))).toEqual(['reserved', 'reserved', 'refused', 'refused']);
  for (const slot of slots.slice(1)) {
    expect(bench.arena.content.get(slot)).toBeUndefined();
    bench.arena.content.set(slot, 'nothing of ours'); // a byte that arrives late
  }
  engine.checkLeases();
  expect(bench.store.stats().counters['fetch.inflight_bytes']).toBe(2);
  bench.clock.advance(60_000);
  expect(bench.store.stats().counters['fetch.inflight_bytes']).toBe(0);
  expect(engine.put(chain('z', 4))).toEqual(['reserved', 'reserved', 'reserved', 'reserved']);
  expect(bench.clock.pending).toBe(0);
});

describe('shares and priorities', () => {
  it('a tier that hangs takes its own share only: another goes on', async () => {
    const bench = new Bench(20, { maxFetchBytes: 8 }, unwritten);
    const [disk, s3] = bench.lower as [typeof bench.disk, typeof bench.disk];
    s3.put(n, chain('slow', 10));
    disk.put(n, chain('x', 8));
    const engine = bench.engine();
    engine.load(chain('slow', 10));
    const id = engine.load(chain('x', 8));
    await bench.answerAll('read', 'ready');
    expect(ended(engine, id)).toEqual([8, '']);
    expect(s3.jobs.length).toBe(4);
  });

  it('prefetch takes what demand leaves, and always gets its one batch', async () => {
    const bench = new Bench(40, { maxFetchBytes: 8, fetchBatchBytes: 2, maxPrefetchedBytes: 40 });
    bench.disk.put(n, [...chain('p', 10), ...chain('d', 10)]);
    const [a, b] = [bench.engine(), bench.engine()];
    const asked = (name: string): number => bench.disk.jobs.filter(({ hashes }) => hashes[0]![0] === name).length;
    expect(a.holdings.prefetch(1n, chain('p', 10))).toEqual({ accepted: true, reason: '' });
    expect(asked('p')).toBe(4); // half of the tier
    const id = b.load(chain('d', 10));
    expect([asked('p'), asked('d')]).toEqual([4, 4]);
    while (asked('p') > 2) bench.answer('read', 'ready');
    await settled();
    expect([asked('p'), asked('d')]).toEqual([2, 6]); // one batch, no more, while there is demand
    await bench.answerAll('read', 'ready');
    expect(ended(b, id)).toEqual([10, '']);
    expect(bench.store.counters.get('prefetch.blocks.from.disk')).toBe(10);
    expect(a.lookup(chain('p', 10)).spans).toEqual([{ tier: 'arena', count: 10 }]);
  });
});

describe('circuit breaker', () => {
  const limits = { breakerFailures: 2, breakerOpenMs: 100, breakerMaxOpenMs: 1000, slowReadMs: 50, fetchBatchBytes: 1 };

  it('opens after failures in a row, is skipped at once, and one read at a time finds out whether it is back', async () => {
    const bench = new Bench(20, limits);
    bench.disk.put(n, chain('x', 6));
    const engine = bench.engine();
    for (let i = 0; i < 2; i++) {
      const id = engine.load(chain('x', 1));
      bench.answer('read', 'failed');
      await settled();
      expect(ended(engine, id)).toEqual([0, 'tier']);
    }
    const report = () => bench.store.stats().tiers[1]!;
    expect([report().breaker, report().breakerReason]).toEqual(['open', 'failed']);
    expect(engine.lookup(chain('x', 6)).held).toBe(0);
    const skipped = engine.load(chain('x', 6));
    await settled();
    expect(ended(engine, skipped)).toEqual([0, 'missing']);
    engine.put(chain('y', 1));
    expect(bench.store.counters.get('writedown.disk.refused.breaker')).toBe(1);
    bench.clock.advance(100);
    expect(report().breaker).toBe('half_open');
    expect(engine.lookup(chain('x', 6)).held).toBe(6);
    const probe = engine.load(chain('x', 6));
    expect(bench.disk.jobs.length).toBe(1);
    bench.answer('read', 'ready');
    await settled();
    expect([report().breaker, report().breakerReason, report().detail.breaker_opened]).toEqual(['closed', '', 1]);
    expect(bench.disk.jobs.length).toBe(5);
    await bench.answerAll('read', 'ready');
    expect(ended(engine, probe)).toEqual([6, '']);
    expect(report().refusals).toEqual({ breaker: 1 });
  });

  it('a tier that answers too slowly is one that fails', async () => {
    const bench = new Bench(20, limits);
    bench.disk.put(n, chain('x', 3));
    const engine = bench.engine();
    for (let i = 0; i < 2; i++) {
      engine.load(chain('x', 1, i));
      bench.clock.advance(51);
      bench.answer('read', 'ready');
      await settled();
    }
    expect(bench.store.stats().tiers[1]).toMatchObject({ breaker: 'open', breakerReason: 'slow' });
    expect(engine.lookup(chain('x', 3)).held).toBe(2); // what it brought is used
  });

  it('that reads opened is closed by no write, and stays open for longer each time', async () => {
    const bench = new Bench(64, { ...limits, breakerMaxOpenMs: 3_200 });
    const engine = bench.engine();
    const report = () => bench.store.stats().tiers[1]!;
    const states: unknown[] = [];
    for (let round = 0; round < 8; round++) {
      for (const name of [`a${round}.`, `b${round}.`]) {
        bench.disk.put(n, chain(name, 1));
        const id = engine.load(chain(name, 1));
        await bench.answerAll('read', 'failed');
        engine.release(id);
      }
      bench.clock.advance(100);
      const before = report().breaker;
      engine.put(chain(`w${round}.`, 1));
      await bench.answerAll('write', 'stored');
      states.push([report().detail.breaker_opened, before, report().breaker]);
    }
    const [open, half] = ['open', 'half_open'];
    expect(states).toEqual([
      [1, half, half],
      [2, open, open],
      [2, half, half],
      [3, open, open],
      [3, open, open],
      [3, open, open],
      [3, half, half],
      [4, open, open],
    ]);
  });

  it('that writes opened a write closes, also where a read failed before', async () => {
    const bench = new Bench(20, limits);
    const engine = bench.engine();
    const state = () => bench.store.stats().tiers[1]!.breaker;
    const write = bench.disk.write.bind(bench.disk);
    const failsToWrite = async (name: string): Promise<void> => {
      bench.disk.write = () => Promise.reject(new Error('no space'));
      engine.put(chain(name, 1));
      await settled();
      bench.disk.write = write;
    };
    await failsToWrite('a');
    await failsToWrite('b');
    bench.clock.advance(100);
    expect(state()).toBe('half_open');
    engine.put(chain('c', 1));
    await bench.answerAll('write', 'stored');
    expect(state()).toBe('closed');
    bench.disk.put(n, chain('x', 1));
    engine.load(chain('x', 1));
    await bench.answerAll('read', 'failed');
    await failsToWrite('d');
    bench.clock.advance(100);
    expect(state()).toBe('half_open');
    engine.put(chain('e', 1));
    await bench.answerAll('write', 'stored');
    expect(state()).toBe('closed');
  });

  it('time in which this process was kept waiting is not its', async () => {
    let runningUs = 0;
    const bench = new Bench(20, limits, { runningUs: () => runningUs });
    bench.disk.put(n, chain('x', 8));
    const engine = bench.engine();
    for (let i = 0; i < 8; i++) {
      engine.load(chain('x', 1, i), 60_000);
      bench.clock.advance(5_000);
      runningUs += i < 6 ? 50_000 : 51_000;
      bench.answer('read', 'ready');
      await settled();
      expect(bench.store.stats().tiers[1]).toMatchObject({ breaker: i < 7 ? 'closed' : 'open' });
    }
  });
});

it('what waits to be written when a circuit opens is written after it, though nothing else happens', async () => {
  const bench = new Bench(8, { breakerFailures: 1, breakerOpenMs: 40, writeDownsIdle: 1 });
  const engine = bench.engine();
  bench.disk.put(n, chain('x', 1));
  engine.put(chain('a', 1));
  engine.put(chain('b', 1)); // waits for the one before it
  engine.load(chain('x', 1), 1000);
  await settled();
  bench.answer('read', 'failed');
  await settled();
  bench.answer('write', 'stored');
  await settled();
  expect(bench.disk.jobs).toEqual([]);
  bench.clock.advance(41);
  await settled();
  expect(bench.disk.jobs.map(({ kind, hashes }) => [kind, hashes])).toEqual([['write', ['b0']]]);
  bench.answer('write', 'stored');
  await settled();
  expect([bench.store.stats().counters['writedown.disk.pending_bytes'], bench.clock.pending]).toEqual([0, 0]);
});

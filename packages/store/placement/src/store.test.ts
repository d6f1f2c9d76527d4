import { describe, expect, it, vi } from 'vitest';
import { Bench, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const done = (loaded: number, reason: string) => expect.objectContaining({ loaded, reason });

/** A chain that lies on disk only: written, stored, then pushed out of the arena by other blocks. */
async function onDisk(bench: Bench, name: string, count: number): Promise<void> {
  const engine = bench.engine();
  engine.put(chain(name, count));
  while (bench.answer('write', 'stored')) await settled();
  const filler = engine.holdings.reserve(null, chain('filler', bench.arena.stats().capacityBytes));
  engine.holdings.abort(filler.flatMap(({ slot }) => (slot === undefined ? [] : [slot])));
  expect(bench.arena.lookup(engine.namespace, chain(name, 1))).toBe(0);
  engine.holdings.end();
}

describe('reserve and commit', () => {
  it('blocks are visible from commit on, to every session of the namespace and to no other', () => {
    const bench = new Bench(8);
    const [a, b, c] = [bench.engine(), bench.engine(), bench.engine('other')];
    const reserved = a.holdings.reserve(null, chain('x', 2));
    expect(reserved.map(({ status }) => status)).toEqual(['reserved', 'reserved']);
    expect(b.lookup(chain('x', 2)).held).toBe(0);
    a.holdings.commit(
      reserved.map(({ slot }) => slot!),
      [1n, 2n],
    );
    expect(b.lookup(chain('x', 3))).toEqual({ held: 2, spans: [{ tier: 'arena', count: 2 }], estimatedUs: 0 });
    expect(c.lookup(chain('x', 2)).held).toBe(0);
  });

  it('a lookup beyond gaps names what is held of all hashes, wherever in the chain', () => {
    const bench = new Bench(8);
    const { holdings } = bench.engine();
    for (const [first, count] of [
      [2, 2],
      [5, 1],
    ] as const) {
      const slots = holdings.reserve(null, chain('x', count, first)).map(({ slot }) => slot!);
      holdings.commit(
        slots,
        slots.map(() => 1n),
      );
    }
    const arena = (count: number) => ({ tier: 'arena', count });
    const gap = (count: number) => ({ tier: '', count });
    expect(bench.store.lookup(holdings.state, chain('x', 7)).held).toBe(0);
    const spans = [gap(2), arena(2), gap(1), arena(1), gap(1)];
    expect(bench.store.lookupAll(holdings.state, chain('x', 7))).toEqual({ held: 3, spans, estimatedUs: 0 });
    // What is behind the last one that is held: a window's end needs nothing of what is in front.
    expect(bench.store.stats().tiers[0]).toMatchObject({ hits: 3, misses: 7 + 1 });
  });

  it('held, busy and refused blocks get no slot; what follows a refused one is refused', () => {
    const bench = new Bench(4, { maxReservedBytes: 2 });
    const [a, b] = [bench.engine(), bench.engine()];
    a.put(chain('x', 1));
    a.holdings.reserve('x0' as never, chain('x', 1, 1));
    const got = b.holdings.reserve(null, chain('x', 6));
    expect(got.map(({ status }) => status)).toEqual(['held', 'busy', 'reserved', 'reserved', 'refused', 'refused']);
    expect(bench.store.counters.get('reserve.refused.session_limit')).toBe(2);
    expect(b.holdings.reserve('nowhere' as never, chain('y', 2)).map(({ status }) => status)).toEqual([
      'refused',
      'refused',
    ]);
    expect(bench.store.counters.get('reserve.refused.no_parent')).toBe(2);
    const c = bench.engine();
    expect(c.holdings.reserve(null, chain('z', 1))[0]!.status).toBe('refused');
    expect(bench.store.counters.get('reserve.refused.no_space')).toBe(1);
  });

  it('abort never publishes and gives the slot back; a slot is committed or aborted once, by its own session', () => {
    const bench = new Bench(1);
    const [a, b] = [bench.engine(), bench.engine()];
    const slot = a.holdings.reserve(null, chain('x', 1))[0]!.slot!;
    const protocol = expect.objectContaining({ code: 'PROTOCOL' });
    expect(() => b.holdings.commit([slot], [0n])).toThrow(protocol);
    expect(() => b.holdings.abort([slot])).toThrow(protocol);
    expect(a.holdings.abort([slot])).toBe(1);
    expect(() => a.holdings.commit([slot], [0n])).toThrow(protocol);
    expect(a.lookup(chain('x', 1)).held).toBe(0);
    expect(b.put(chain('x', 1))).toEqual(['reserved']);
  });

  it('a namespace has one block size at a time', () => {
    const bench = new Bench(2);
    const engine = bench.engine();
    const open = () => bench.store.open(engine.namespace, 2, 16);
    expect(open).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
    engine.holdings.end();
    open().end();
  });
});

describe('write-down', () => {
  it('blocks are pinned while they are written; refusals are counted and keep the block', async () => {
    const bench = new Bench(2);
    const engine = bench.engine();
    engine.put(chain('x', 2));
    expect(engine.put(chain('y', 1))).toEqual(['refused']);
    expect(bench.answer('write', 'refused')).toBe(true);
    await settled();
    expect(bench.store.counters.get('writedown.disk.refused.tier')).toBe(2);
    expect(engine.lookup(chain('x', 2)).held).toBe(2);
    expect(engine.put(chain('y', 1))).toEqual(['reserved']);
  });

  it('a slow disk does not keep new blocks out: what waits may be evicted, and is counted', async () => {
    const bench = new Bench(4, { writeDownsIdle: 1, writeDownBatchBytes: 1 });
    const engine = bench.engine();
    engine.put(chain('x', 4));
    expect(engine.put(chain('y', 3))).toEqual(['reserved', 'reserved', 'reserved']);
    expect(engine.lookup(chain('x', 4)).held).toBe(1); // the one that is being written
    while (bench.answer('write', 'stored')) await settled();
    expect(bench.store.counters.get('writedown.disk.refused.evicted')).toBe(3);
    expect(bench.disk.stats().blocks).toBe(4);
    expect(bench.store.stats().counters['writedown.disk.pending_bytes']).toBe(0);
  });

  it('of small blocks no more go in one write than a turn has time for', async () => {
    const bench = new Bench(300, { writeDownBatchBytes: 1000, writeDownBatchBlocks: 128, writeDownsIdle: 1 });
    const engine = bench.engine();
    const written: number[] = [];
    const write = bench.disk.write.bind(bench.disk);
    bench.disk.write = (namespace, blocks) => {
      written.push(blocks.length);
      return write(namespace, blocks);
    };
    engine.put(chain('x', 300));
    await bench.answerAll('write', 'stored');
    expect(written.slice(-2)).toEqual([128, 44]);
    expect(Math.max(...written)).toBe(128);
    expect(bench.disk.stats().blocks).toBe(300);
  });

  it('of what was evicted while it waited no more is passed over in a turn than that has time for, also at the end', async () => {
    const bench = new Bench(10, { maxWriteDownBytes: 1e6, writeDownBatchBytes: 1, writeDownsIdle: 1 });
    const engine = bench.engine();
    const evicted = (): number => bench.store.counters.get('writedown.disk.refused.evicted');
    engine.put(chain('x', 1)); // it is being written, so that the others wait
    for (let n = 0; n < 1_000; n++) engine.put(chain(`y${n}.`, 9));
    bench.answer('write', 'stored');
    await settled();
    const inTurns = [evicted()];
    engine.put(chain('y999.', 9)); // whoever else would go on with the queue in this turn
    inTurns.push(evicted());
    bench.clock.advance(0);
    inTurns.push(evicted());
    const closed = bench.store.close();
    while (bench.disk.jobs.length === 0) {
      bench.clock.advance(0);
      inTurns.push(evicted());
    }
    expect(inTurns.at(-1)).toBe(999 * 9);
    expect(inTurns[0]).toBeLessThan(8_000);
    expect(inTurns[1]).toBe(inTurns[0]);
    expect(Math.max(...inTurns.slice(1).map((count, at) => count - inTurns[at]!))).toBe(inTurns[0]);
    await bench.answerAll('write', 'stored');
    await closed;
    expect([bench.disk.stats().blocks, bench.clock.pending]).toEqual([10, 0]);
  });

  it('the queue is bounded', () => {
    const bench = new Bench(8, { maxWriteDownBytes: 3 });
    bench.engine().put(chain('x', 5));
    expect(bench.store.counters.get('writedown.disk.refused.queue_full')).toBe(2);
    expect(bench.store.stats().counters['writedown.disk.pending_bytes']).toBe(3);
  });

  it('close writes what is queued, and gives up after its time', async () => {
    const bench = new Bench(8);
    bench.engine().put(chain('x', 8));
    const closed = bench.store.close();
    while (bench.answer('write', 'stored')) await settled();
    await closed;
    expect(bench.disk.stats().blocks).toBe(8);

    const stuck = new Bench(8, { closeDrainMs: 100, writeDownsIdle: 1 });
    stuck.engine().put(chain('x', 8));
    const given = stuck.store.close();
    stuck.clock.advance(100);
    await given;
    expect(stuck.store.counters.get('writedown.disk.refused.closing')).toBe(4);
  });
});

describe('load', () => {
  it('what lies in the arena is ready at once; the rest follows in chain order, whatever order it arrives in', async () => {
    const bench = new Bench(8);
    await onDisk(bench, 'x', 4);
    const engine = bench.engine();
    expect(engine.lookup(chain('x', 5))).toMatchObject({ held: 4, spans: [{ tier: 'disk', count: 4 }] });
    const id = engine.load(chain('x', 5));
    await settled();
    bench.disk.jobs.reverse();
    for (let left = 3; left >= 0; left--) {
      expect(engine.loads.get(id)!.blocks.length).toBe(0);
      bench.answer('read', 'ready');
      if (left > 0) await settled();
    }
    await settled();
    expect(engine.loads.get(id)).toEqual(done(4, 'missing'));
    expect(engine.loads.get(id)!.tiers).toEqual(['disk', 'disk', 'disk', 'disk']);
    engine.checkLeases();
    expect(engine.lookup(chain('x', 4)).spans).toEqual([{ tier: 'arena', count: 4 }]);
    expect(bench.arena.busySlots).toBe(4);
    engine.release(id);
    expect(bench.arena.busySlots).toBe(0);
    expect(bench.clock.pending).toBe(0);
  });

  it('its blocks and its end are told to the engine before tiers hear that they are used', async () => {
    const bench = new Bench(8);
    const engine = bench.engine();
    engine.put(chain('x', 2));
    const seen: string[] = [];
    vi.spyOn(bench.arena, 'touch').mockImplementation((_, hashes) => void seen.push(`touch ${hashes.length}`));
    engine.holdings.load(1n, chain('x', 2), 100, {
      onReady: (first, blocks) => void seen.push(`ready ${first} ${blocks.length}`),
      onDone: (loaded) => void seen.push(`done ${loaded}`),
    });
    await settled();
    expect(seen).toEqual(['ready 0 2', 'done 2', 'touch 2']);
  });

  it('two loads of one block share one read', async () => {
    const bench = new Bench(8);
    await onDisk(bench, 'x', 2);
    const [a, b] = [bench.engine(), bench.engine()];
    const ids = [a.load(chain('x', 2)), b.load(chain('x', 2))] as const;
    expect(bench.disk.jobs.length).toBe(2);
    while (bench.answer('read', 'ready'));
    await settled();
    expect(a.loads.get(ids[0])).toEqual(done(2, ''));
    expect(b.loads.get(ids[1])).toEqual(done(2, ''));
  });

  it.each([
    ['corrupt', 'corrupt'],
    ['failed', 'tier'],
    ['missing', 'missing'],
  ] as const)(
    'a block that is %s ends the prefix there, and nothing beyond it stays pinned',
    async (answer, reason) => {
      const bench = new Bench(8);
      await onDisk(bench, 'x', 4);
      const engine = bench.engine();
      const id = engine.load(chain('x', 4));
      bench.answer('read', 'ready');
      bench.answer('read', answer);
      while (bench.answer('read', 'ready'));
      await settled();
      expect(engine.loads.get(id)).toEqual(done(1, reason));
      expect(bench.arena.busySlots).toBe(1);
    },
  );

  it('the deadline ends a load with its longest ready prefix; what arrives later still becomes an arena block', async () => {
    const bench = new Bench(8);
    await onDisk(bench, 'x', 3);
    const engine = bench.engine();
    const id = engine.load(chain('x', 3), 50);
    bench.answer('read', 'ready');
    await settled();
    bench.clock.advance(50);
    expect(engine.loads.get(id)).toEqual(done(1, 'deadline'));
    while (bench.answer('read', 'ready'));
    await settled();
    expect(engine.lookup(chain('x', 3)).spans).toEqual([{ tier: 'arena', count: 3 }]);
    expect(bench.arena.busySlots).toBe(1);
    const now = engine.load(chain('x', 3), 0);
    await settled();
    expect(engine.loads.get(now)).toEqual(done(3, ''));
  });

  it('no slot that may be evicted ends a load with "capacity"', async () => {
    const bench = new Bench(4);
    await onDisk(bench, 'x', 3);
    const [reader, writer] = [bench.engine(), bench.engine()];
    writer.holdings.reserve(null, chain('y', 2));
    const id = reader.load(chain('x', 3));
    while (bench.answer('read', 'ready')) await settled();
    expect(reader.loads.get(id)).toEqual(done(2, 'capacity'));
  });

  it('one session may lease a bounded part, and start a bounded number of loads', async () => {
    const bench = new Bench(8, { maxLeasedBytes: 3, maxLoads: 2 });
    const engine = bench.engine();
    engine.put(chain('x', 5));
    const first = engine.load(chain('x', 2));
    const second = engine.load(chain('x', 5));
    await settled();
    expect(engine.loads.get(first)).toEqual(done(2, ''));
    expect(engine.loads.get(second)).toEqual(done(1, 'capacity'));
    expect(() => engine.load(chain('x', 1))).toThrow(expect.objectContaining({ code: 'BUSY', retry: true }));
  });

  it('a tier whose read is stuck counts as empty for new loads until it answers', async () => {
    const bench = new Bench(8, { stuckReadMs: 100 });
    await onDisk(bench, 'x', 2);
    const engine = bench.engine();
    engine.load(chain('x', 1), 50);
    bench.clock.advance(101);
    expect(engine.lookup(chain('x', 2)).held).toBe(0);
    bench.answer('read', 'ready');
    await settled();
    expect(engine.lookup(chain('x', 2)).held).toBe(2);
  });
});

describe('corrupt reports', () => {
  it('a block of the arena that is found wrong leaves it; its slot lives until the last reader has gone', async () => {
    const bench = new Bench(4, {}, { plans: { disk: { write: 'none' } } });
    const [a, b] = [bench.engine(), bench.engine()];
    a.put(chain('x', 2));
    const [inA, inB] = [a.load(chain('x', 2)), b.load(chain('x', 2))];
    await settled();
    bench.damaged.add('nx1');
    a.release(inA, [1, 99, 1, 1]);
    await settled();
    expect(a.lookup(chain('x', 2)).held).toBe(1);
    expect(a.put(chain('x', 1, 1), 'x0' as never)).toEqual(['busy']);
    b.checkLeases();
    b.release(inB);
    expect(a.put(chain('x', 1, 1), 'x0' as never)).toEqual(['reserved']);
    const { counters } = bench.store;
    expect([counters.get('release.corrupt'), counters.get('release.corrupt.found')]).toEqual([1, 1]);
  });

  it('an engine that finds wrong what is sound removes nothing, here or below, and is told of', async () => {
    const bench = new Bench(4, {}, { lower: ['disk', 'redis'] });
    const engine = bench.engine();
    engine.put(chain('x', 3));
    for (const tier of bench.lower) await bench.answerAll('write', 'stored', tier);
    const id = engine.load(chain('x', 3));
    await settled();
    engine.release(id, [0, 1, 2]);
    await settled();
    expect(engine.lookup(chain('x', 3)).spans).toEqual([{ tier: 'arena', count: 3 }]);
    expect(bench.lower.map((tier) => tier.lookup(namespaceNamed('n'), chain('x', 3)))).toEqual([3, 3]);
    expect(bench.store.counters.get('release.corrupt.unfounded')).toBe(3);
    expect(bench.arena.busySlots).toBe(0);
  });

  it('what is found wrong in the arena is not held against the tiers below: they verify what they read', async () => {
    const bench = new Bench(4);
    const engine = bench.engine();
    engine.put(chain('x', 1));
    await bench.answerAll('write', 'stored');
    const id = engine.load(chain('x', 1));
    await settled();
    bench.damaged.add('nx0');
    engine.release(id, [0]);
    await settled();
    expect(engine.lookup(chain('x', 1)).spans).toEqual([{ tier: 'disk', count: 1 }]);
  });

  it('no more is looked at at a time than may be; the rest leaves the arena unseen', async () => {
    const bench = new Bench(8, { maxVerifiedBlocks: 3 }, { plans: { disk: { write: 'none' } } });
    const engine = bench.engine();
    engine.put(chain('x', 8));
    const id = engine.load(chain('x', 8));
    await settled();
    engine.release(id, [0, 1, 2, 3, 4]);
    await settled();
    expect(bench.store.counters.get('release.corrupt.unseen')).toBe(2);
    expect(engine.lookup(chain('x', 8)).held).toBe(3);
    expect(bench.arena.stats().blocks).toBe(6);
    expect(bench.arena.busySlots).toBe(0);
  });

  it('a block that came from disk and was found corrupt while another session wrote it is not made twice', async () => {
    const bench = new Bench(8, { stuckReadMs: 100 });
    await onDisk(bench, 'x', 2);
    const [a, b, c] = [bench.engine(), bench.engine(), bench.engine()];
    a.load(chain('x', 1), 50);
    bench.clock.advance(101);
    const slot = a.holdings.reserve(null, chain('x', 1, 1))[0]!.slot!; // the tier is stuck: nobody seems to hold it
    bench.answer('read', 'ready');
    await settled();
    const [inB, inC] = [b.load(chain('x', 1, 1)), c.load(chain('x', 1, 1))];
    bench.answer('read', 'ready');
    await settled();
    bench.damaged.add('nx1');
    b.release(inB, [0]);
    await settled();
    expect(a.holdings.commit([slot], [0n])).toBe(1);
    expect(bench.store.counters.get('commit.duplicate')).toBe(1);
    c.checkLeases();
    c.release(inC);
    expect(a.lookup(chain('x', 1, 1)).spans).toEqual([{ tier: 'disk', count: 1 }]);
    bench.store.checkIntegrity();
  });

  it('an object of another size than the session has is removed, so that its name can be written again', async () => {
    const bench = new Bench(4);
    await onDisk(bench, 'x', 1);
    const wide = bench.store.open(namespaceNamed('n'), 2, 16);
    const onDone = vi.fn();
    wide.load(1n, chain('x', 1), 1000, { onReady: () => {}, onDone });
    bench.answer('read', 'ready');
    await settled();
    expect(onDone).toHaveBeenCalledExactlyOnceWith(0, 'corrupt');
    expect(wide.reserve(null, chain('x', 1))[0]!.status).toBe('reserved');
  });
});

describe('pins', () => {
  it('a pinned block is not evicted until its time is over, it is unpinned, or the session ends', async () => {
    const bench = new Bench(2, { maxPinnedBytes: 1, maxPinTtlMs: 500 });
    const engine = bench.engine();
    engine.put(chain('x', 2));
    while (bench.answer('write', 'refused')) await settled();
    expect(engine.holdings.pin(chain('x', 3), 10_000)).toBe(1);
    expect(bench.arena.busySlots).toBe(1);
    bench.clock.advance(500);
    expect(bench.arena.busySlots).toBe(0);
    engine.holdings.pin(chain('x', 1), 100);
    expect(engine.holdings.unpin(chain('x', 2))).toBe(1);
    engine.holdings.pin(chain('x', 1), 100);
    engine.holdings.disconnect();
    expect(bench.arena.busySlots).toBe(0);
    expect(bench.clock.pending).toBe(0);
  });
});

it('after disconnect slots stay taken, and other sessions may write the same blocks; end gives all back', async () => {
  const bench = new Bench(6);
  const [a, b] = [bench.engine(), bench.engine()];
  a.put(chain('x', 2));
  while (bench.answer('write', 'stored')) await settled();
  a.load(chain('x', 2));
  await settled();
  a.holdings.reserve('x1' as never, chain('x', 2, 2));
  a.holdings.disconnect();
  expect(a.holdings.holdsSlots).toBe(true);
  expect(bench.arena.busySlots).toBe(4);
  expect(b.put(chain('x', 2, 2), 'x1' as never)).toEqual(['reserved', 'reserved']);
  while (bench.answer('write', 'stored')) await settled();
  a.checkLeases();
  a.holdings.end();
  expect(bench.arena.busySlots).toBe(0);
  expect(b.lookup(chain('x', 4)).held).toBe(4);
  bench.store.checkIntegrity();
});

it('a chain that is offered keeps what the arena holds of it: its tail does not push out its head', async () => {
  const bench = new Bench(6, {}, { plans: { disk: { write: 'none' } } });
  const engine = bench.engine();
  engine.put(chain('x', 4));
  engine.put(chain('y', 2)); // used later
  expect(engine.put(chain('x', 8))).toEqual([
    ...['held', 'held', 'held', 'held'],
    ...['reserved', 'reserved', 'refused', 'refused'],
  ]);
  expect(bench.arena.lookup(namespaceNamed('n'), chain('x', 8))).toBe(6);
  // Nor the block before it, which is its parent.
  expect(engine.put(chain('x', 1, 6), chain('x', 1, 5)[0]!)).toEqual(['reserved']);
  expect(bench.arena.lookup(namespaceNamed('n'), chain('x', 1, 5))).toBe(1);
  expect(bench.arena.busySlots).toBe(0);
});

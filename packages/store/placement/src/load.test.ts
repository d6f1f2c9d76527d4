/** What many blocks were loaded for is over: they are let go over several turns, and are in nobody's way meanwhile. */
import { describe, expect, it } from 'vitest';
import { stepping } from './steps.ts';
import { Bench, type BenchOptions, type BlockWriter, chain, settled } from './testing/bench.ts';

const count = 2_048;
const batch = 512;
const stepBlocks = stepping.blocks;
const limits = { maxReservedBytes: 1e6, maxLeasedBytes: count, unpinBatchBlocks: batch };

async function leased(changes: object = {}): Promise<{ bench: Bench; engine: BlockWriter; id: bigint }> {
  const bench = new Bench(3 * count, { ...limits, ...changes }, { lower: [] });
  const engine = bench.engine();
  engine.put(chain('x', count));
  const id = await loaded(engine, 'x');
  return { bench, engine, id };
}

/** `ManualClock` goes on where a load begins over several turns. */
async function loaded(engine: BlockWriter, name: string): Promise<bigint> {
  const id = engine.load(chain(name, count));
  for (let turn = 0; turn < 4; turn++) {
    await settled();
    engine.bench.clock.advance(0);
  }
  expect(engine.loads.get(id)).toMatchObject({ loaded: count, reason: '' });
  return id;
}

const pinned = ({ store }: Bench): number => store.stats().counters['arena.pinned_blocks']!;

/** Pinned blocks after each turn, until there are none. */
async function seenOf(bench: Bench): Promise<number[]> {
  const seen = [pinned(bench)];
  for (let turn = 0; seen.at(-1)! > 0 && turn < 100; turn++) {
    await settled();
    seen.push(pinned(bench));
  }
  return seen;
}

const inBatches = [3 * batch, 2 * batch, batch, 0];

describe('a long load is let go some in each turn', () => {
  it('when it is released', async () => {
    const { bench, engine, id } = await leased();
    await settled();
    engine.release(id);
    expect(engine.holdings.counts.loads).toBe(0);
    expect(await seenOf(bench)).toEqual(inBatches);
    expect(bench.arena.busySlots).toBe(0);
  });

  it('when its session ends, with all others of it', async () => {
    const { bench, engine } = await leased({ maxLeasedBytes: 2 * count });
    await loaded(engine, 'x');
    engine.holdings.end();
    const seen = await seenOf(bench); // twice as many turns
    expect([seen.length, seen.slice(-4)]).toEqual([8, inBatches]);
    expect(bench.clock.pending).toBeLessThanOrEqual(1); // what notes the uses of blocks
  });

  it('when its first block does not come, and the engine hears that at once', async () => {
    const bench = new Bench(3 * count, limits);
    const engine = bench.engine();
    bench.disk.put(engine.namespace, chain('x', 1));
    engine.put(chain('x', count - 1, 1));
    await bench.answerAll('write', 'refused');
    const id = engine.load(chain('x', count));
    for (let turn = 0; turn < 4; turn++) {
      await settled();
      bench.clock.advance(0);
    }
    expect(pinned(bench)).toBe(count - 1);
    bench.answer('read', 'failed');
    await Promise.resolve();
    await Promise.resolve();
    expect(engine.loads.get(id)).toMatchObject({ loaded: 0, reason: 'tier' });
    expect(pinned(bench)).toBe(count - 1 - batch);
    engine.release(id);
    expect(await seenOf(bench)).toEqual(inBatches.map((left) => Math.max(0, left - 1)));
  });
});

it('a long load without time begins over several turns, too, and ends with what is there', async () => {
  const bench = new Bench(3 * count, limits);
  const engine = bench.engine();
  const there = 1_500;
  bench.disk.put(engine.namespace, chain('x', 1, there));
  engine.put(chain('x', there));
  engine.put(chain('x', count - there - 1, there + 1));
  await bench.answerAll('write', 'refused');
  const id = engine.load(chain('x', count), 0);
  await settled();
  const view = engine.loads.get(id)!;
  expect([view.blocks.length, view.reason]).toEqual([1_024, undefined]);
  bench.clock.advance(0);
  await settled();
  expect([view.blocks.length, view.loaded, view.reason]).toEqual([there, there, 'deadline']);
  expect(bench.disk.jobs.filter(({ kind }) => kind === 'read')).toEqual([]);
  expect(pinned(bench)).toBe(there);
});

it('what is let go and what is loaded next are together no more than a session may lease', async () => {
  const { bench, engine, id } = await leased({ unpinBatchBlocks: 1 });
  engine.put(chain('y', count));
  engine.release(id);
  expect(pinned(bench)).toBeGreaterThan(count - 10);
  const next = engine.load(chain('y', count));
  const seen: number[] = [];
  for (let turn = 0; turn < 4; turn++) {
    seen.push(pinned(bench));
    await settled();
    bench.clock.advance(0);
  }
  expect(engine.loads.get(next)).toMatchObject({ loaded: count, reason: '' });
  expect(Math.max(...seen)).toBeLessThanOrEqual(count);
  expect(pinned(bench)).toBe(count);
  engine.checkLeases();
  bench.store.checkIntegrity();
});

describe('what is let go is no reason to refuse others in the same turn', () => {
  /** An arena, or a tenant's share of one, full of a chain that is leased. */
  async function full(
    options: BenchOptions = {},
    slots = count,
  ): Promise<{ bench: Bench; engine: BlockWriter; id: bigint }> {
    const bench = new Bench(slots, { ...limits, maxFetchBytes: 1e6 }, options);
    const engine = bench.engine('n', { tenant: 't' });
    engine.put(chain('x', count));
    if (bench.lower.length > 0) await bench.answerAll('write', 'refused');
    const id = await loaded(engine, 'x');
    return { bench, engine, id };
  }

  /** Read while other things go on, to its end. */
  async function read(bench: Bench): Promise<void> {
    for (let turn = 0; turn < 4; turn++) {
      await settled();
      bench.clock.advance(0);
      await bench.answerAll('read', 'ready');
    }
  }

  it('who reserve', async () => {
    const { bench, engine, id } = await full({ lower: [] });
    engine.release(id);
    const other = bench.engine();
    const reservations = other.holdings.reserve(null, chain('y', count));
    expect(reservations.filter(({ status }) => status === 'reserved')).toHaveLength(count);
    bench.store.checkIntegrity();
  });

  it.each([
    ['who load from a lower tier', {}, count],
    ['a tenant whose share it is', { quotas: { t: { arena: count } } }, 3 * count],
  ])('%s', async (_, options, slots) => {
    const { bench, engine, id } = await full(options, slots);
    const other = bench.engine('n', { tenant: 't' });
    const wanted = chain('y', count - 48);
    bench.disk.put(engine.namespace, wanted);
    engine.release(id);
    const next = other.load(wanted);
    await read(bench);
    expect(other.loads.get(next)).toMatchObject({ loaded: wanted.length, reason: '' });
    expect(bench.store.counters.get('quota.refused.arena')).toBe(0);
    bench.store.checkIntegrity();
  });

  it('and who needs a little drives no more than a little of it', async () => {
    const { bench, engine, id } = await full({ lower: [] });
    await settled();
    engine.release(id);
    const other = bench.engine();
    expect(other.put(chain('y', batch + 1))).toEqual(Array.from({ length: batch + 1 }, () => 'reserved'));
    expect(pinned(bench)).toBe(count - batch - stepBlocks);
    const left = chain('x', count - batch - stepBlocks);
    expect(engine.lookup(chain('x', count)).held).toBeGreaterThanOrEqual(left.length); // its end went first
  });
});

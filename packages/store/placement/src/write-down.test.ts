/** What becomes of blocks that are still to be written when the store closes, and while the tier is out of service. */
import { describe, expect, it } from 'vitest';
import { Bench, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');
const answerMs = 500;

/** Chains a, b, ... of eight blocks each, in this order, all of them dirty; the disk takes four blocks at a time. */
function dirty(names: string): Bench {
  const bench = new Bench(64, { writeDownsIdle: 1, maxDirtyBytes: 64 }, { plans: { disk: { write: 'back' } } });
  const engine = bench.engine();
  for (const name of names) {
    engine.put(chain(name, 4));
    engine.put(chain(name, 4, 4), chain(name, 4).at(-1)!);
  }
  expect(bench.store.stats().tiers[1]!.detail.write_dirty_bytes).toBe(8 * names.length);
  return bench;
}

/** The disk answers one write each half second. Returns how long the store took. */
async function closeSlowly(bench: Bench): Promise<number> {
  let isClosed = false;
  const closed = bench.store.close().then(() => {
    isClosed = true;
  });
  let ms = 0;
  for (await settled(); !isClosed; await settled()) {
    bench.clock.advance(answerMs);
    ms += answerMs;
    bench.answer('write', 'stored');
  }
  await closed;
  return ms;
}

const onDisk = (bench: Bench, names: string): number[] =>
  [...names].map((name) => bench.disk.lookup(n, chain(name, 8)));

it('what is to be written back has five seconds; the chains that were used last go first, and of each its beginning', async () => {
  const bench = dirty('abcdefgh');
  // The chain that was committed first is used again.
  const engine = bench.engine();
  const id = engine.load(chain('a', 8));
  await settled();
  engine.release(id);
  expect(await closeSlowly(bench)).toBe(5_000);
  expect(onDisk(bench, 'abcdefgh')).toEqual([8, 0, 0, 0, 8, 8, 8, 8]);
  expect(bench.store.counters.get('writedown.disk.refused.closing')).toBe(24);
});

it('a chain for whose end there is no time is there from its beginning', async () => {
  const bench = dirty('abcdefg');
  const closed = bench.store.close();
  await settled();
  bench.answer('write', 'stored');
  await settled();
  bench.clock.advance(5_000);
  await closed;
  expect(onDisk(bench, 'abcdefg')).toEqual([0, 0, 0, 0, 0, 0, 4]);
});

describe('a tier that is out of service', () => {
  /** Of the disk; each write in flight is of two blocks. */
  const limits = { breakerOpenMs: 1_000, writeDownBatchBytes: 2, writeDownsIdle: 1 };
  const says = (bench: Bench, inService: boolean, outOfServiceReason: string): void => {
    const stats = bench.disk.stats.bind(bench.disk);
    bench.disk.stats = () => ({ ...stats(), inService, outOfServiceReason });
  };
  const refused = (bench: Bench, reason: string): number =>
    bench.store.counters.get(`writedown.disk.refused.${reason}`);
  const pending = (bench: Bench): number => bench.store.stats().counters['writedown.disk.pending_bytes']!;
  const jobs = (bench: Bench): (readonly string[])[] => bench.disk.jobs.map(({ hashes }) => hashes);
  /** Answers what is being written now, and nothing that comes of it. */
  async function refuses(bench: Bench): Promise<void> {
    await settled();
    for (let left = bench.disk.jobs.length; left > 0; left--) bench.answer('write', 'refused');
    await settled();
  }

  it('is not tried until it is back; then all is written that was queued, refused or committed meanwhile', async () => {
    const bench = new Bench(16, limits);
    const engine = bench.engine();
    engine.put(chain('x', 4));
    says(bench, false, 'gone');
    await refuses(bench);
    engine.put(chain('y', 2));
    for (let seconds = 0; seconds < 30; seconds++) {
      expect([jobs(bench), pending(bench)]).toEqual([[], 6]);
      bench.clock.advance(1_000);
    }
    says(bench, true, '');
    bench.clock.advance(1_000);
    expect(jobs(bench)).toEqual([['x0', 'x1']]);
    await bench.answerAll('write', 'stored');
    expect(onDisk(bench, 'xy')).toEqual([4, 2]);
    expect([refused(bench, 'tier'), pending(bench), bench.clock.pending]).toEqual([0, 0, 0]);
  });

  it('keeps nothing in the arena; what has left that makes room in the queue, and the rest waits a minute', async () => {
    const bench = new Bench(6, { ...limits, maxWriteDownBytes: 6 });
    const engine = bench.engine();
    engine.put(chain('x', 6));
    says(bench, false, 'gone');
    await refuses(bench);
    bench.clock.advance(30_000);
    expect(engine.put(chain('y', 4))).toEqual(['reserved', 'reserved', 'reserved', 'reserved']);
    const counts = (): number[] => [
      ...['evicted', 'queue_full', 'tier'].map((why) => refused(bench, why)),
      pending(bench),
    ];
    // x0 and x1 are those that it refused; x2 and x3 were in front of the queue, x4 and x5 are there.
    expect(counts()).toEqual([2, 2, 0, 6]);
    bench.clock.advance(30_000);
    expect(counts()).toEqual([2, 2, 0, 6]);
    bench.clock.advance(1_000);
    expect(counts()).toEqual([4, 2, 2, 2]);
    bench.clock.advance(30_000);
    expect([jobs(bench), ...counts(), bench.clock.pending]).toEqual([[], 4, 2, 4, 0, 0]);
  });

  it('what it refuses once more when it is back is refused', async () => {
    const bench = new Bench(8, limits);
    const engine = bench.engine();
    engine.put(chain('x', 2));
    says(bench, false, 'gone');
    await refuses(bench);
    says(bench, true, '');
    bench.clock.advance(1_000);
    says(bench, false, 'gone again');
    await refuses(bench);
    expect([refused(bench, 'tier'), pending(bench), bench.clock.pending]).toEqual([2, 0, 0]);
  });

  it('in part: the others are written, and what was refused waits until no part is out, or for 15 s', async () => {
    const bench = new Bench(16, limits);
    const engine = bench.engine();
    engine.put(chain('x', 2));
    says(bench, true, 'one of three');
    await refuses(bench);
    engine.put(chain('y', 2));
    await bench.answerAll('write', 'stored');
    expect([onDisk(bench, 'xy'), pending(bench), jobs(bench)]).toEqual([[0, 2], 2, []]);
    bench.clock.advance(10_000);
    expect(jobs(bench)).toEqual([]);
    says(bench, true, '');
    bench.clock.advance(1_000);
    await bench.answerAll('write', 'stored');
    expect([onDisk(bench, 'xy'), pending(bench), bench.clock.pending]).toEqual([[2, 2], 0, 0]);
    engine.put(chain('z', 2));
    says(bench, true, 'another one');
    await refuses(bench);
    for (let seconds = 0; seconds < 15; seconds++) bench.clock.advance(1_000);
    expect(jobs(bench)).toEqual([]);
    bench.clock.advance(1_000);
    expect(jobs(bench)).toEqual([['z0', 'z1']]);
    await refuses(bench);
    expect([refused(bench, 'tier'), pending(bench), bench.clock.pending]).toEqual([2, 0, 0]);
  });

  it('in part: what was refused takes half of the queue at most', async () => {
    const bench = new Bench(16, { ...limits, maxWriteDownBytes: 8 });
    const engine = bench.engine();
    says(bench, true, 'one of three');
    engine.put(chain('x', 8));
    await bench.answerAll('write', 'refused');
    expect([refused(bench, 'tier'), refused(bench, 'queue_full'), pending(bench)]).toEqual([4, 0, 4]);
    engine.put(chain('y', 4));
    await bench.answerAll('write', 'stored');
    says(bench, true, '');
    bench.clock.advance(1_000);
    await bench.answerAll('write', 'stored');
    expect([onDisk(bench, 'xy'), pending(bench), bench.clock.pending]).toEqual([[4, 4], 0, 0]);
  });

  it('in part: what it refused takes nothing of a quota while it waits', async () => {
    const bench = new Bench(32, limits, { quotas: { t: { disk: 8 } } });
    const engine = bench.engine('n', { tenant: 't' });
    engine.put(chain('x', 8));
    await bench.answerAll('write', 'stored');
    says(bench, true, 'one of three');
    for (const name of 'abcd') {
      engine.put(chain(name, 2));
      await refuses(bench);
    }
    expect([onDisk(bench, 'x'), pending(bench)]).toEqual([[6], 8]);
    expect(bench.store.counters.get('quota.evicted.disk')).toBe(2);
    says(bench, true, '');
    bench.clock.advance(1_000);
    await bench.answerAll('write', 'stored');
    expect([onDisk(bench, 'xabcd'), pending(bench)]).toEqual([[0, 2, 2, 2, 2], 0]);
    engine.put(chain('y', 8));
    await bench.answerAll('write', 'stored');
    expect([onDisk(bench, 'yabcd'), refused(bench, 'quota')]).toEqual([[8, 0, 0, 0, 0], 0]);
  });

  it('in part: what finds no room in a quota any more when it is tried again is refused', async () => {
    const bench = new Bench(32, { ...limits, writeDownsIdle: 2 }, { quotas: { t: { disk: 2 } } });
    const engine = bench.engine('n', { tenant: 't' });
    says(bench, true, 'one of three');
    engine.put(chain('a', 2));
    await refuses(bench);
    engine.put(chain('b', 2)); // which are being written when the others are tried
    await settled();
    expect(jobs(bench)).toEqual([['b0', 'b1']]);
    const closed = bench.store.close();
    await settled();
    expect([refused(bench, 'quota'), bench.store.counters.get('quota.refused.disk')]).toEqual([2, 2]);
    await bench.answerAll('write', 'stored');
    await closed;
    expect([onDisk(bench, 'ab'), pending(bench)]).toEqual([[0, 2], 0]);
  });

  it('in part: what is evicted while it waits, and made anew, is written', async () => {
    const bench = new Bench(4, limits);
    const engine = bench.engine();
    says(bench, true, 'one of three');
    engine.put(chain('x', 2));
    await refuses(bench);
    const slots = (): (number | undefined)[] => chain('x', 2).map((hash) => bench.arena.get(n, hash)?.slot);
    const before = slots();
    engine.put(chain('y', 4));
    await bench.answerAll('write', 'stored');
    expect(slots()).toEqual([undefined, undefined]);
    engine.put(chain('z', 1)); // so that they come to other slots
    engine.put(chain('x', 2));
    expect(slots()).not.toEqual(before);
    await bench.answerAll('write', 'stored');
    expect(onDisk(bench, 'xz')).toEqual([0, 1]);
    says(bench, true, '');
    bench.clock.advance(1_000);
    await bench.answerAll('write', 'stored');
    expect([onDisk(bench, 'xy'), refused(bench, 'evicted'), pending(bench)]).toEqual([[2, 4], 0, 0]);
  });

  it('in part: bursts are held back while something of it waits', async () => {
    const bench = new Bench(32, { ...limits, maxHeldBytes: 4 }, { plans: { disk: { settleMs: 100 } } });
    const engine = bench.engine();
    says(bench, true, 'one of three');
    engine.put(chain('x', 3));
    bench.clock.advance(100);
    await refuses(bench);
    await refuses(bench);
    expect([pending(bench), jobs(bench)]).toEqual([3, []]);
    engine.put(chain('y', 2));
    await settled();
    expect(jobs(bench)).toEqual([]);
    bench.clock.advance(100);
    expect(jobs(bench)).toEqual([['y0', 'y1']]);
  });

  it('is tried once more when the store closes, and not waited for', async () => {
    const bench = new Bench(8, limits);
    bench.engine().put(chain('x', 4));
    says(bench, false, 'gone');
    await refuses(bench);
    const closed = bench.store.close();
    await bench.answerAll('write', 'refused');
    await closed;
    expect([refused(bench, 'tier'), refused(bench, 'closing'), bench.clock.pending]).toEqual([4, 0, 0]);
  });
});

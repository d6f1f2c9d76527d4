/** What is written where, who pays for it, and when it ends. */
import type { Tier } from '@kvtier/tiers';
import { describe, expect, it, vi } from 'vitest';
import { Bench, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');

/** The load that holds these blocks has come and gone. */
async function use(engine: ReturnType<Bench['engine']>, hashes: ReturnType<typeof chain>): Promise<void> {
  const id = engine.load(hashes);
  await settled();
  engine.release(id);
}

describe('write policies', () => {
  it('none writes nothing; through writes at commit, and what was refused again when it is used again', async () => {
    const bench = new Bench(8, {}, { lower: ['disk', 's3'], plans: { s3: { write: 'none' } } });
    const engine = bench.engine();
    engine.put(chain('x', 2));
    await bench.answerAll('write', 'refused');
    expect(bench.disk.lookup(n, chain('x', 2))).toBe(0);
    await use(engine, chain('x', 2));
    await bench.answerAll('write', 'stored');
    expect(bench.disk.lookup(n, chain('x', 2))).toBe(2);
    expect(engine.holdings.reserve(null, chain('x', 2)).map(({ status }) => status)).toEqual(['held', 'held']);
    expect(bench.lower.map(({ jobs }) => jobs.length)).toEqual([0, 0]);
  });

  it('selective writes what its admission policy takes: at the second touch', async () => {
    const bench = new Bench(8, {}, { plans: { disk: { write: 'selective', admission: 'second-touch' } } });
    const engine = bench.engine();
    engine.put(chain('x', 3));
    expect(bench.disk.jobs).toEqual([]);
    expect(bench.store.counters.get('writedown.disk.refused.admission')).toBe(3);
    await use(engine, chain('x', 2));
    await bench.answerAll('write', 'stored');
    expect(bench.disk.lookup(n, chain('x', 3))).toBe(2);
  });

  it('a burst of commits is written when it has settled', async () => {
    const bench = new Bench(16, { maxHeldBytes: 100 }, { plans: { disk: { settleMs: 100 } } });
    const engine = bench.engine();
    for (let i = 0; i < 3; i++) {
      engine.put(chain('x', 1, i));
      bench.clock.advance(99);
      expect(bench.disk.jobs).toEqual([]);
    }
    bench.clock.advance(1);
    await bench.answerAll('write', 'stored');
    expect(bench.disk.lookup(n, chain('x', 3))).toBe(3);
    engine.put(chain('y', 1)); // the next burst is held as well
    bench.clock.advance(99);
    expect(bench.disk.jobs).toEqual([]);
    bench.clock.advance(1);
    expect(bench.disk.jobs.map(({ kind }) => kind)).toEqual(['write']);
  });

  it('a burst without an end is written after eight times the settling time', async () => {
    const bench = new Bench(16, { maxHeldBytes: 100 }, { plans: { disk: { settleMs: 100 } } });
    const engine = bench.engine();
    for (let i = 0; i < 10; i++) {
      engine.put(chain('x', 1, i));
      expect(bench.disk.jobs.length, `after ${i * 80} ms`).toBe(0);
      bench.clock.advance(80);
    }
    expect(bench.disk.jobs.map(({ kind }) => kind)).toContain('write');
  });

  it('a burst is written at once when too much waits, and when the store closes', async () => {
    const bench = new Bench(16, { maxHeldBytes: 3 }, { plans: { disk: { settleMs: 100 } } });
    const engine = bench.engine();
    engine.put(chain('x', 2));
    expect(bench.disk.jobs).toEqual([]);
    engine.put(chain('x', 1, 2));
    expect(bench.disk.jobs.map(({ kind }) => kind)).toEqual(['write']);
    await bench.answerAll('write', 'stored');
    engine.put(chain('y', 2));
    expect(bench.disk.jobs).toEqual([]);
    const closed = bench.store.close();
    await bench.answerAll('write', 'stored');
    await closed;
    expect(bench.disk.lookup(n, chain('y', 2))).toBe(2);
  });

  it('a block that is offered again is written without any commit', async () => {
    const bench = new Bench(8);
    const engine = bench.engine();
    engine.put(chain('x', 1));
    await bench.answerAll('write', 'refused');
    expect(engine.holdings.reserve(null, chain('x', 1)).map(({ status }) => status)).toEqual(['held']);
    await settled();
    expect(bench.disk.jobs.map(({ kind }) => kind)).toEqual(['write']);
    await bench.answerAll('write', 'stored');
    expect(bench.disk.lookup(n, chain('x', 1))).toBe(1);
  });

  it.each(['redis', 's3', 'peer'])(
    'what %s alone holds and an engine has computed is kept here, and not written there again',
    async (name) => {
      const bench = new Bench(8, {}, { lower: ['disk', name], plans: { disk: { write: 'none' } } });
      const shared = bench.lower[1]!;
      const engine = bench.engine();
      shared.put(n, chain('x', 3));
      expect(engine.put(chain('x', 2))).toEqual(['reserved', 'reserved']);
      expect(bench.arena.lookup(n, chain('x', 3))).toBe(2);
      expect(engine.put(chain('x', 2))).toEqual(['held', 'held']);
      await settled();
      expect(bench.lower.map(({ jobs }) => jobs.length)).toEqual([0, 0]);
      // What a chain goes on from need not be here.
      expect(engine.holdings.reserve(chain('x', 3)[2]!, chain('x', 1, 3)).map(({ status }) => status)).toEqual([
        'reserved',
      ]);
    },
  );

  const rooms = [
    { what: 'its session may reserve', limits: { maxReservedBytes: 4 }, taken: 0 },
    { what: 'its session may reserve, half of that', limits: { maxReservedBytes: 8 }, taken: 2 },
    { what: 'the arena has', slots: 6, taken: 1 },
    { what: 'its tenant may have', quota: 4, taken: 0 },
  ];
  it.each(rooms)('what s3 alone holds gets only what is left of the room that $what, and is touched', async (room) => {
    const { limits = {}, slots = 32, quota, taken } = room;
    const quotas = quota === undefined ? {} : { quotas: { t: { arena: quota } } };
    const bench = new Bench(slots, limits, { lower: ['disk', 's3'], plans: { disk: { write: 'none' } }, ...quotas });
    const s3 = bench.lower[1]!;
    const touch = vi.spyOn(s3 as Tier, 'touch');
    s3.put(n, chain('x', 6));
    const engine = bench.engine('n', { tenant: 't' });
    const held = Array<string>(6 - taken).fill('held');
    const put = ['reserved', 'reserved'];
    expect(engine.put(chain('x', 8))).toEqual([...Array<string>(taken).fill('reserved'), ...held, ...put]);
    await bench.answerAll('write', 'stored', s3);
    expect(s3.lookup(n, chain('x', 8))).toBe(8);
    expect(touch.mock.calls.flatMap(([, hashes]) => hashes).sort()).toEqual(chain('x', 6));
    expect(engine.put(chain('x', 1, 8), 'x7' as never)).toEqual(['reserved']);
    const { counters } = bench.store;
    expect([counters.get('reserve.reserved'), counters.get('reserve.held')]).toEqual([taken + 3, 6 - taken]);
    bench.store.checkIntegrity();
  });

  it('what s3 alone holds is held behind what is refused, and what follows it is not refused for its sake', () => {
    const bench = new Bench(2, { maxReservedBytes: 1 }, { lower: ['disk', 's3'], plans: { disk: { write: 'none' } } });
    bench.lower[1]!.put(n, [...chain('x', 2), ...chain('x', 1, 4)]);
    const statuses = bench
      .engine()
      .holdings.reserve(null, chain('x', 5))
      .map(({ status, reason }) => reason || status);
    expect(statuses).toEqual(['held', 'held', 'reserved', 'session_limit', 'held']);
  });

  it('what the disk alone holds is held', async () => {
    const bench = new Bench(8, {}, { lower: ['disk', 's3'], plans: { s3: { write: 'none' } } });
    bench.disk.put(n, chain('x', 2));
    expect(bench.engine().put(chain('x', 2))).toEqual(['held', 'held']);
    expect(bench.arena.lookup(n, chain('x', 2))).toBe(0);
  });

  it('selective takes a used block although a slower tier has it, and without promotion', async () => {
    const plans = { disk: { write: 'selective', admission: 'second-touch', promote: false } } as const;
    const bench = new Bench(8, {}, { lower: ['disk', 's3'], plans });
    const engine = bench.engine();
    engine.put(chain('x', 2));
    await bench.answerAll('write', 'stored', bench.lower[1]);
    expect(bench.lower.map((tier) => tier.lookup(n, chain('x', 2)))).toEqual([0, 2]);
    await use(engine, chain('x', 2));
    await bench.answerAll('write', 'stored');
    expect(bench.lower.map((tier) => tier.lookup(n, chain('x', 2)))).toEqual([2, 2]);
  });

  it('back writes the coldest before the arena is half unwritten, and all of it at close', async () => {
    const bench = new Bench(8, { maxDirtyBytes: 3 }, { plans: { disk: { write: 'back' } } });
    const engine = bench.engine();
    engine.put(chain('x', 3));
    expect(bench.disk.jobs).toEqual([]);
    await use(engine, chain('x', 1));
    engine.put(chain('y', 1));
    await bench.answerAll('write', 'stored');
    expect(bench.disk.lookup(n, chain('x', 1, 1))).toBe(1); // x0 is warmer
    expect(bench.store.stats().tiers[1]!.detail.write_dirty_bytes).toBe(3);
    const closed = bench.store.close();
    await bench.answerAll('write', 'stored');
    await closed;
    expect(bench.disk.stats().blocks).toBe(4);
  });

  it('a block that is evicted before it was written back is counted', () => {
    const bench = new Bench(2, { maxDirtyBytes: 2 }, { plans: { disk: { write: 'back' } } });
    const engine = bench.engine();
    engine.put(chain('x', 2));
    engine.put(chain('y', 1));
    expect(bench.store.counters.get('writedown.disk.refused.evicted')).toBe(1);
  });

  it('what comes from a slow tier goes to the faster ones whose plan takes it', async () => {
    const plans = { nvme: { promote: true }, redis: { promote: false }, s3: { write: 'none' as const } };
    const bench = new Bench(8, {}, { lower: ['nvme', 'redis', 's3'], plans });
    const s3 = bench.lower[2]!;
    s3.put(n, chain('x', 2));
    const engine = bench.engine();
    engine.load(chain('x', 2));
    await bench.answerAll('read', 'ready', s3);
    await bench.answerAll('write', 'stored', bench.lower[0]);
    expect(bench.lower.map((tier) => tier.lookup(n, chain('x', 2)))).toEqual([2, 0, 2]);
    expect(bench.store.counters.get('promotion.blocks.nvme')).toBe(2);
    expect(bench.lower[1]!.jobs).toEqual([]);
  });
});

describe('quotas', () => {
  const quotas = { small: { arena: 3, disk: 2 }, '*': { arena: 5 } };

  it('a tenant over its quota makes room out of its own blocks, children first; the others keep theirs', async () => {
    const bench = new Bench(20, {}, { quotas });
    const [small, other] = [bench.engine('n', { tenant: 'small' }), bench.engine('n', { tenant: 'other' })];
    other.put(chain('o', 4));
    small.put(chain('x', 3));
    await bench.answerAll('write', 'stored');
    small.lookup(chain('x', 3));
    expect(small.put(chain('y', 1))).toEqual(['reserved']);
    expect(bench.arena.lookup(n, chain('x', 3))).toBe(2); // its child went
    expect(bench.arena.lookup(n, chain('o', 4))).toBe(4);
    expect(bench.store.counters.get('quota.evicted.arena')).toBe(1);
    expect(bench.store.stats().counters).toMatchObject({ 'quota.bytes.arena.small': 3, 'quota.bytes.arena.other': 4 });
    await bench.answerAll('write', 'stored');
    expect(bench.store.stats().counters['quota.bytes.disk.small']).toBe(2);
    expect(bench.disk.lookup(n, chain('o', 4))).toBe(4);
    expect(bench.disk.stats().blocks).toBe(6);
    bench.store.checkIntegrity();
  });

  it('what is reserved or leased counts, and then it is refused, with the reason', async () => {
    const bench = new Bench(20, {}, { quotas });
    const small = bench.engine('n', { tenant: 'small' });
    const reserved = small.holdings.reserve(null, chain('x', 5));
    expect(reserved.map(({ status, reason }) => [status, reason])).toEqual([
      ['reserved', ''],
      ['reserved', ''],
      ['reserved', ''],
      ['refused', 'quota'],
      ['refused', 'quota'],
    ]);
    expect(bench.store.counters.get('reserve.refused.quota')).toBe(2);
    small.holdings.abort(reserved.flatMap(({ slot }) => (slot === undefined ? [] : [slot])));
    small.put(chain('x', 3));
    small.load(chain('x', 3));
    await settled();
    expect(small.put(chain('y', 1))).toEqual(['refused']);
  });

  it('blocks of an earlier life count for the tenant that brings them into the arena', async () => {
    const bench = new Bench(20, {}, { quotas });
    bench.disk.put(n, chain('x', 5));
    const small = bench.engine('n', { tenant: 'small' });
    const id = small.load(chain('x', 5));
    await bench.answerAll('read', 'ready');
    expect(small.loads.get(id)).toMatchObject({ loaded: 3, reason: 'capacity' });
    small.release(id);
    expect(bench.store.stats().counters['quota.bytes.arena.small']).toBe(3);
    small.put(chain('y', 2));
    expect(bench.store.stats().counters['quota.bytes.arena.small']).toBe(3);
  });
});

it('a block that others bring into the arena takes the room of the tenant that owns it', async () => {
  const bench = new Bench(20, {}, { quotas: { small: { arena: 2 } } });
  const small = bench.engine('n', { tenant: 'small' });
  for (const name of ['a', 'b', 'c']) {
    small.put(chain(name, 2));
    await bench.answerAll('write', 'stored');
  }
  const other = bench.engine();
  for (const name of ['a', 'b']) {
    other.load(chain(name, 2), 1000);
    await bench.answerAll('read', 'ready');
    expect(bench.store.stats().counters['quota.bytes.arena.small']).toBeLessThanOrEqual(2);
  }
});

it('a tier that is back with what it held takes no tenant over its quota: the coldest of it goes', async () => {
  const bench = new Bench(20, {}, { quotas: { small: { arena: 10, disk: 3 } } });
  const [small, other] = [bench.engine('n', { tenant: 'small' }), bench.engine()];
  const told: string[] = [];
  small.put(chain('x', 3));
  other.put(chain('o', 2));
  await bench.answerAll('write', 'stored');
  // The device breaks, others take its place; the arena still knows whose the blocks are. Then it is back.
  bench.disk.remove(n, [...chain('x', 3), ...chain('o', 2)]);
  small.put(chain('y', 2));
  await bench.answerAll('write', 'stored');
  expect(bench.store.stats().counters['quota.bytes.disk.small']).toBe(2);
  bench.disk.follow(({ kind, hashes }) => told.push(...hashes.map((hash) => `${kind} ${hash}`)));
  told.length = 0;
  bench.disk.put(n, [...chain('x', 3), ...chain('o', 2)]);
  await settled();
  expect(bench.store.stats().counters['quota.bytes.disk.small']).toBe(3);
  expect(bench.disk.lookup(n, chain('o', 2))).toBe(2);
  expect(bench.disk.stats().blocks).toBe(5);
  expect(bench.store.counters.get('quota.evicted.disk')).toBe(2);
  expect(told.slice(0, 5).every((each) => each.startsWith('stored'))).toBe(true);
  expect(told.slice(5)).toEqual(['removed y1', 'removed y0']);
  bench.store.checkIntegrity();
});

describe('time to live', () => {
  it('a block is a miss from its second on, and leaves every tier', async () => {
    const bench = new Bench(8);
    const [brief, lasting] = [bench.engine('n', { ttlS: 10 }), bench.engine('n')];
    brief.put(chain('x', 2));
    lasting.put(chain('y', 2));
    await bench.answerAll('write', 'stored');
    bench.clock.advance(9_999);
    expect(lasting.lookup(chain('x', 2)).held).toBe(2);
    bench.clock.advance(1);
    expect(lasting.lookup(chain('x', 2)).held).toBe(0);
    expect([bench.arena.lookup(n, chain('x', 1)), bench.disk.lookup(n, chain('x', 1))]).toEqual([0, 0]);
    expect(lasting.lookup(chain('y', 2)).held).toBe(2);
    expect(bench.store.counters.get('expired.blocks')).toBe(2);
    expect(bench.clock.pending).toBe(0);
    bench.store.checkIntegrity();
  });

  it('one that is being read goes when the reader has gone, and can be made anew', async () => {
    const bench = new Bench(8);
    const engine = bench.engine('n', { ttlS: 10 });
    engine.put(chain('x', 1));
    await bench.answerAll('write', 'stored');
    const id = engine.load(chain('x', 1));
    await settled();
    bench.clock.advance(10_000);
    engine.checkLeases();
    expect(engine.put(chain('x', 1))).toEqual(['busy']);
    engine.release(id);
    expect(engine.put(chain('x', 1))).toEqual(['reserved']);
    bench.clock.advance(5_000);
    expect(engine.lookup(chain('x', 1)).held).toBe(1);
  });

  it('of a tier: a block leaves that tier only, so long after it came there last', async () => {
    const bench = new Bench(8, {}, { plans: { disk: { ttlSeconds: 10 } } });
    bench.disk.put(n, chain('old', 1));
    const engine = bench.engine();
    bench.clock.advance(5_000);
    engine.put(chain('x', 1));
    await bench.answerAll('write', 'stored');
    bench.disk.remove(n, chain('x', 1));
    bench.clock.advance(2_000);
    bench.disk.put(n, chain('x', 1));
    bench.clock.advance(3_000);
    expect([engine.lookup(chain('old', 1)).held, bench.disk.lookup(n, chain('x', 1))]).toEqual([0, 1]);
    bench.clock.advance(5_000);
    expect(bench.disk.lookup(n, chain('x', 1))).toBe(1);
    bench.clock.advance(2_000);
    expect([engine.lookup(chain('x', 1)).held, bench.disk.lookup(n, chain('x', 1))]).toEqual([1, 0]);
    expect(bench.store.counters.get('expired.blocks.disk')).toBe(2);
  });

  it('many that expire together go in several turns', async () => {
    const bench = new Bench(20, { touchBatchBlocks: 4 });
    const engine = bench.engine('n', { ttlS: 1 });
    engine.put(chain('x', 10));
    await bench.answerAll('write', 'stored');
    bench.clock.advance(1_000);
    expect(engine.lookup(chain('x', 10)).held).toBe(0);
    for (const left of [6, 2, 0]) {
      expect(bench.arena.stats().bytes).toBe(left);
      bench.clock.advance(0);
    }
  });
});

it('recency of a long chain is told in later turns, from its tail, and what is too much is dropped', () => {
  const bench = new Bench(20, { touchBatchBlocks: 4, maxTouchBlocks: 15 });
  const engine = bench.engine();
  engine.put(chain('x', 10));
  expect(engine.lookup(chain('x', 10)).held).toBe(10);
  expect(bench.store.stats().counters['touch.pending_blocks']).toBe(10);
  engine.lookup(chain('x', 10));
  expect(bench.store.counters.get('touch.dropped.queue_full')).toBe(10);
  for (const left of [6, 2, 0]) {
    bench.clock.advance(0);
    expect(bench.store.stats().counters['touch.pending_blocks']).toBe(left);
  }
  expect(bench.clock.pending).toBe(0);
});

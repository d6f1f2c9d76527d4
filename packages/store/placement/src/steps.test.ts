/** What is done to many blocks over several turns, and what may happen between these. */
import type { HashKey } from '@kvtier/identity';
import { describe, expect, it } from 'vitest';
import { inOneTurn, type Steps, stepping } from './steps.ts';
import { Bench, type BlockWriter, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';
import { type Ticket, ticketBytes, ticketOf } from './tickets.ts';

const generous = { maxReservedBytes: 1e6, maxPinnedBytes: 1e6, maxPinTtlMs: 60_000, maxLeasedBytes: 1e6 };
const stepBlocks = stepping.blocks;
const ticket = (number: number): Ticket => ticketOf(Buffer.alloc(ticketBytes, number));
const benchOf = (slots: number, limits = {}): Bench => new Bench(slots, { ...generous, ...limits }, { lower: [] });

/** So many steps, none of them the last. */
function go(steps: Steps<unknown>, count: number): void {
  for (let step = 0; step < count; step++) expect(steps.next().done).toBe(false);
}

function pinOf(count: number, limits = {}): { bench: Bench; engine: BlockWriter; steps: Steps<number> } {
  const bench = benchOf(2 * count, limits);
  const engine = bench.engine();
  engine.put(chain('x', count));
  return { bench, engine, steps: engine.holdings.pinning(chain('x', count), 1_000, ticket(1)) };
}

const nothing = (bench: Bench): void => {
  bench.store.checkIntegrity();
  expect([bench.arena.busySlots, bench.store.stats().counters['arena.pinned_blocks']]).toEqual([0, 0]);
};

describe('a pin of many blocks', () => {
  it('goes on step by step, and ends as if it had been one', async () => {
    const { bench, engine, steps } = pinOf(8_192);
    const seen: number[] = [];
    for (let step = steps.next(); ; step = steps.next()) {
      seen.push(engine.holdings.counts.pins);
      if (step.done) break;
    }
    expect(seen).toEqual(Array.from({ length: 8_192 / stepBlocks }, (_, at) => (at + 1) * stepBlocks));
    expect(bench.arena.busySlots).toBe(8_192);
    bench.clock.advance(1_000);
    for (let turn = 0; turn < 10; turn++) await settled();
    expect(bench.clock.pending).toBe(0);
    nothing(bench);
  });

  it('says exactly what it keeps in the end, though some of it has left meanwhile', async () => {
    const { bench, engine, steps } = pinOf(4 * stepBlocks);
    go(steps, 2);
    const wrong = [0, stepBlocks, 3 * stepBlocks];
    for (const at of wrong) bench.damaged.add(`nx${at}`);
    const load = engine.load(chain('x', 4 * stepBlocks));
    await settled();
    engine.release(load, wrong);
    await settled();
    expect(inOneTurn(steps)).toBe(4 * stepBlocks - 3);
    expect([engine.holdings.counts.pins, bench.arena.busySlots]).toEqual([4 * stepBlocks - 3, 4 * stepBlocks - 3]);
    bench.clock.advance(1_000);
    nothing(bench);
  });

  it('whose ticket is shown meanwhile keeps nothing, and counts all', () => {
    const { bench, steps } = pinOf(4 * stepBlocks);
    go(steps, 2);
    expect(bench.store.endPin(namespaceNamed('n'), ticket(1), null)).toBe(2 * stepBlocks);
    expect([inOneTurn(steps), bench.clock.pending]).toEqual([4 * stepBlocks, 0]);
    nothing(bench);
  });

  it('beyond the bound of tickets stays for its time, and is ended by nobody', () => {
    const { bench, steps } = pinOf(4 * stepBlocks, { maxTicketBlocks: 3 * stepBlocks });
    expect(inOneTurn(steps)).toBe(4 * stepBlocks);
    expect(bench.store.counters.get('pin.refused.tickets')).toBe(1);
    expect([bench.store.endPin(namespaceNamed('n'), ticket(1), null), bench.arena.busySlots]).toEqual([
      0,
      4 * stepBlocks,
    ]);
    bench.clock.advance(1_000);
    expect(bench.clock.pending).toBe(0);
    nothing(bench);
  });
});

describe('a session that ends in the midst', () => {
  it.each(['pinning', 'reserving', 'committing', 'aborting'] as const)('of %s leaves nothing', (what) => {
    const bench = benchOf(8 * stepBlocks);
    const engine = bench.engine();
    const hashes = chain('x', 4 * stepBlocks);
    if (what === 'pinning') engine.put(hashes);
    if (what === 'reserving') engine.put(hashes.slice(0, stepBlocks));
    const slots = what.endsWith('tting') || what === 'aborting' ? engine.holdings.reserve(null, hashes) : [];
    const offsets = slots.map(({ slot }) => slot!);
    const steps: Steps<unknown> = {
      pinning: () => engine.holdings.pinning(hashes, 1_000, ticket(1)),
      reserving: () => engine.holdings.reserving(null, hashes),
      committing: () =>
        engine.holdings.committing(
          offsets,
          offsets.map(() => 0n),
        ),
      aborting: () => engine.holdings.aborting(offsets),
    }[what]();
    go(steps, 2);
    engine.holdings.disconnect();
    inOneTurn(steps); // whoever goes on with it all the same changes nothing
    engine.holdings.end();
    expect(bench.clock.pending).toBeLessThanOrEqual(1); // what notes the uses of blocks
    nothing(bench);
    expect(
      bench
        .engine()
        .put(chain('y', 8 * stepBlocks))
        .every((status) => status === 'reserved'),
    ).toBe(true);
  });
});

it('what is left early gives back what it held for itself', () => {
  const bench = benchOf(8 * stepBlocks);
  const engine = bench.engine();
  const hashes = chain('x', 4 * stepBlocks);
  engine.put(hashes.slice(0, 3 * stepBlocks));
  const steps = engine.holdings.reserving(null, hashes);
  go(steps, 3);
  expect(bench.arena.busySlots).toBeGreaterThan(0);
  steps.return([]);
  nothing(bench);
});

it('none of a chain is evicted for another of it, nor by others between two steps', () => {
  const bench = benchOf(4 * stepBlocks);
  const [engine, other] = [bench.engine(), bench.engine()];
  const hashes = chain('x', 4 * stepBlocks);
  engine.put(hashes.slice(0, 2 * stepBlocks));
  const steps = engine.holdings.reserving(null, hashes);
  go(steps, 4); // the chain is pinned, and nothing taken yet
  expect(other.put(chain('y', 3 * stepBlocks)).filter((status) => status === 'reserved')).toHaveLength(2 * stepBlocks);
  const statuses = inOneTurn(steps).map(({ status }) => status);
  expect(statuses).toEqual(
    Array.from({ length: 4 * stepBlocks }, (_, at) => (at < 2 * stepBlocks ? 'held' : 'reserved')),
  );
  expect(engine.lookup(hashes).held).toBe(2 * stepBlocks);
});

it('a chain that is committed can be had from its beginning on, step by step', () => {
  const bench = benchOf(4 * stepBlocks);
  const engine = bench.engine();
  const hashes: HashKey[] = chain('x', 4 * stepBlocks);
  const slots = engine.holdings.reserve(null, hashes).map(({ slot }) => slot!);
  const steps = engine.holdings.committing(
    slots,
    slots.map(() => 0n),
  );
  const held: number[] = [];
  for (let step = steps.next(); ; step = steps.next()) {
    held.push(engine.lookup(hashes).held);
    if (step.done) break;
  }
  expect(held).toEqual([1, 2, 3, 4].map((count) => count * stepBlocks));
  expect(bench.store.counters.get('commit.blocks')).toBe(4 * stepBlocks);
});

it('what comes to its end between two steps is made anew, and the chain behind it is not refused', () => {
  const bench = benchOf(8 * stepBlocks);
  const engine = bench.engine('n', { ttlS: 1 });
  const hashes = chain('x', 4 * stepBlocks);
  engine.put(hashes.slice(0, 3 * stepBlocks));
  const steps = engine.holdings.reserving(null, hashes);
  go(steps, 5); // all of it is pinned, and of the first it was said that it is held
  bench.clock.wallAheadMs = 1_000; // none of it was removed yet
  expect(inOneTurn(steps).map(({ status }) => status)).toEqual(
    hashes.map((_, at) => (at < stepBlocks ? 'held' : 'reserved')),
  );
  bench.store.checkIntegrity();
});

describe('what many blocks were pinned for is over', () => {
  const count = 8 * stepBlocks;
  const batch = 2 * stepBlocks;
  const limits = { unpinBatchBlocks: batch };
  const pinned = (): { bench: Bench; engine: BlockWriter } => {
    const { bench, engine, steps } = pinOf(count, limits);
    expect(inOneTurn(steps)).toBe(count);
    return { bench, engine };
  };
  const show = (bench: Bench, number = 1): number => bench.store.endPin(namespaceNamed('n'), ticket(number), null);

  it.each([
    ['by its ticket, which says at once how many these are', (bench: Bench) => void expect(show(bench)).toBe(count)],
    ['by its time', (bench: Bench) => bench.clock.advance(1_000)],
    ['with its session', (_: Bench, engine: BlockWriter) => engine.holdings.disconnect()],
  ])('%s: they are let go some in each turn', async (_, end) => {
    const { bench, engine } = pinned();
    await settled();
    end(bench, engine);
    const seen: number[] = [];
    for (let left = bench.arena.busySlots; left > 0; left = bench.arena.busySlots) {
      seen.push(left);
      await settled();
    }
    const freed = seen.map((left, turn) => (seen[turn - 1] ?? count) - left);
    for (const one of freed) expect([batch - 1, batch]).toContain(one); // to give a ticket up counts like a block
    engine.holdings.end();
    await settled();
    expect([bench.clock.pending, show(bench)]).toEqual([0, 0]);
    nothing(bench);
  });

  it('for all sessions and tickets together, however many end at once', async () => {
    const bench = benchOf(count, limits);
    const engines = [bench.engine(), bench.engine()];
    engines[0]!.put(chain('x', count));
    for (let at = 0; at < 16; at++) {
      engines[at % 2]!.holdings.pin(chain('x', count / 16, (at * count) / 16), 1_000, ticket(at));
    }
    await settled();
    bench.clock.advance(1_000);
    expect(bench.arena.busySlots).toBeLessThan(count);
    expect(bench.arena.busySlots).toBeGreaterThanOrEqual(count - batch);
    for (let turn = 0; turn < 5; turn++) await settled();
    expect(bench.clock.pending).toBe(0);
    nothing(bench);
  });

  it('with a new pin of its ticket, which goes on step by step and keeps what it is for', async () => {
    const { bench, engine } = pinned();
    const steps = engine.holdings.pinning(chain('x', count, stepBlocks), 1_000, ticket(1));
    go(steps, count / stepBlocks);
    expect(inOneTurn(steps)).toBe(count - stepBlocks);
    await settled();
    expect([engine.holdings.counts.pins, bench.arena.busySlots]).toEqual([count - stepBlocks, count - stepBlocks]);
    expect(show(bench)).toBe(count - stepBlocks);
  });

  it('then they take no room from what the session pins next, and it unpins none of them', async () => {
    const { bench, engine, steps } = pinOf(count, { ...limits, maxPinnedBytes: count });
    inOneTurn(steps);
    engine.put(chain('y', count));
    await settled();
    show(bench);
    expect(engine.holdings.counts.pins).toBe(count - batch);
    expect(engine.holdings.pin(chain('y', count), 1_000)).toBe(count);
    expect(bench.store.counters.get('pin.refused.session_limit')).toBe(0);
    await settled();
    bench.clock.advance(1_000);
    expect(engine.holdings.unpin(chain('y', count))).toBe(0);
    nothing(bench);
  });

  it('and what is pinned anew before it was let go stays', async () => {
    const { bench, engine } = pinned();
    const other = bench.engine();
    await settled();
    show(bench);
    engine.holdings.pin(chain('x', stepBlocks, count - stepBlocks), 5_000);
    expect(other.holdings.pin(chain('x', stepBlocks), 5_000)).toBe(stepBlocks);
    for (let turn = 0; turn < 5; turn++) await settled();
    expect(bench.arena.busySlots).toBe(2 * stepBlocks);
  });

  it('with the session: its tickets are nobody’s from then on, and others may have them', async () => {
    const bench = benchOf(2 * batch, { unpinBatchBlocks: 4 });
    const [engine, next] = [bench.engine(), bench.engine()];
    engine.put(chain('x', 2 * batch));
    for (let at = 0; at < 16; at++) engine.holdings.pin(chain('x', 10, at * 10), 1_000, ticket(at));
    await settled();
    engine.holdings.end();
    expect([show(bench, 15), bench.store.counters.get('pin.tickets.unknown')]).toEqual([0, 1]);
    expect(next.holdings.pin(chain('x', 10), 1_000, ticket(14))).toBe(10);
    for (let turn = 0; turn < 60; turn++) await settled();
    expect([bench.arena.busySlots, show(bench, 14)]).toEqual([10, 10]);
    for (let turn = 0; turn < 5; turn++) await settled();
    expect([bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0]);
  });
});

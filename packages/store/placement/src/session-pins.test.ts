/** Pins with tickets: whoever was handed one ends the pin, and nobody else's; without it the pin ends by its time, as any. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { Bench, type BlockWriter, chain, namespaceNamed } from './testing/bench.ts';
import { SteppedTier, settled } from './testing/model.ts';
import { type Ticket, ticketBytes, ticketOf } from './tickets.ts';

const ticket = (number: number): Ticket => ticketOf(Buffer.alloc(ticketBytes, number));
const generous = { maxPinnedBytes: 100, maxPinTtlMs: 10_000 };

/** Blocks of a chain that are committed, and written down so that nothing else keeps them. */
async function stored(bench: Bench, engine: BlockWriter, name: string, count: number): Promise<void> {
  engine.put(chain(name, count));
  await bench.answerAll('write', 'refused');
}

async function pinned(limits = {}): Promise<{ bench: Bench; prefill: BlockWriter; decode: BlockWriter }> {
  const bench = new Bench(64, { ...generous, ...limits });
  const [prefill, decode] = [bench.engine(), bench.engine()];
  await stored(bench, prefill, 'x', 10);
  expect(prefill.holdings.pin(chain('x', 8), 1_000, ticket(1))).toBe(8);
  expect(bench.arena.busySlots).toBe(8);
  return { bench, prefill, decode };
}

const show = (bench: Bench, number: number, name = 'n', hash = chain('x', 1)[0]!): number =>
  bench.store.endPin(namespaceNamed(name), ticket(number), hash);

describe('a ticket', () => {
  it('ends the pin at once, and once', async () => {
    const { bench, prefill } = await pinned();
    expect([show(bench, 1), bench.arena.busySlots, prefill.holdings.counts.pins]).toEqual([8, 0, 0]);
    expect([show(bench, 1), bench.clock.pending]).toEqual([0, 0]);
    expect(bench.store.counters.get('pin.tickets.shown')).toBe(1);
    expect(bench.store.counters.get('pin.tickets.unknown')).toBe(1);
  });

  it('of another pin or another namespace ends nothing, nor one that was shown after the time of its pin', async () => {
    const { bench } = await pinned();
    expect([show(bench, 2), show(bench, 1, 'm'), bench.arena.busySlots]).toEqual([0, 0, 8]);
    bench.clock.advance(1_000);
    expect([bench.arena.busySlots, show(bench, 1), bench.clock.pending]).toEqual([0, 0, 0]);
  });

  it('leaves what another ticket keeps, or the session without one', async () => {
    const { bench, prefill } = await pinned();
    prefill.holdings.pin(chain('x', 10), 1_000, ticket(2));
    prefill.holdings.pin(chain('x', 2), 1_000);
    expect([show(bench, 1), bench.arena.busySlots]).toEqual([0, 10]);
    expect([show(bench, 2), bench.arena.busySlots]).toEqual([8, 2]);
    bench.clock.advance(1_000);
    expect([bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0]);
  });

  it('lets go what somebody else wanted until a moment ago', async () => {
    const { bench, prefill } = await pinned();
    prefill.holdings.pin(chain('x', 8), 100);
    bench.clock.advance(200);
    expect([bench.arena.busySlots, show(bench, 1), bench.arena.busySlots, bench.clock.pending]).toEqual([8, 8, 0, 0]);
  });

  it('leaves what another session keeps', async () => {
    const { bench, decode } = await pinned();
    decode.holdings.pin(chain('x', 4), 1_000);
    expect([show(bench, 1), bench.arena.busySlots]).toEqual([8, 4]);
  });

  it('may be shown before the pin comes: then nothing is kept, and all counts', async () => {
    const bench = new Bench(64, generous);
    const engine = bench.engine();
    await stored(bench, engine, 'x', 4);
    expect(show(bench, 1)).toBe(0);
    expect([engine.holdings.pin(chain('x', 6), 1_000, ticket(1)), bench.arena.busySlots]).toEqual([6, 0]);
  });

  it('is taken again by its session, with more blocks or fewer, and its time begins anew', async () => {
    const { bench, prefill } = await pinned();
    bench.clock.advance(600);
    expect(prefill.holdings.pin(chain('x', 10, 1), 1_000, ticket(1))).toBe(9);
    expect(bench.arena.busySlots).toBe(9);
    bench.clock.advance(600);
    expect([show(bench, 1), bench.clock.pending]).toEqual([9, 0]);
  });

  it('of another session is refused, until that session has ended', async () => {
    const { bench, prefill, decode } = await pinned();
    expect(() => decode.holdings.pin(chain('x', 1), 1_000, ticket(1))).toThrow(/another session/);
    expect(decode.holdings.counts.pins).toBe(0);
    prefill.holdings.disconnect();
    expect([bench.arena.busySlots, show(bench, 1), bench.clock.pending]).toEqual([0, 0, 0]);
    const other = ticket(3);
    expect(decode.holdings.pin(chain('x', 1), 1_000, other)).toBe(1);
    decode.holdings.end();
    expect([bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0]);
  });

  it('beyond the bound of a session is not kept: the pin ends by its time', async () => {
    const { bench, prefill } = await pinned({ maxTicketBlocks: 10 });
    expect(prefill.holdings.pin(chain('x', 3), 1_000, ticket(2))).toBe(3);
    expect([show(bench, 2), show(bench, 1), bench.arena.busySlots]).toEqual([0, 5, 3]);
    expect(prefill.holdings.pin(chain('x', 10), 500, ticket(4))).toBe(10);
    expect(show(bench, 4)).toBe(7);
    bench.clock.advance(1_000);
    expect([bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0]);
  });

  it('that was shown is remembered among so many, the last ones', async () => {
    const bench = new Bench(64, { ...generous, maxShownTickets: 3 });
    const engine = bench.engine();
    await stored(bench, engine, 'x', 4);
    for (let number = 1; number <= 4; number++) show(bench, number);
    expect([4, 3, 2].map((number) => engine.holdings.pin(chain('x', 1), 1_000, ticket(number)))).toEqual([1, 1, 1]);
    expect(bench.arena.busySlots).toBe(0);
    engine.holdings.pin(chain('x', 1), 1_000, ticket(1));
    expect(bench.arena.busySlots).toBe(1);
  });

  it('that is none of this node goes to the tiers whose holders may have it, unless one of these has told it', async () => {
    const told: string[] = [];
    class Others extends SteppedTier {
      endPin({ key }: { key: string }, bytes: Buffer, hash: string): void {
        told.push(`${key} ${bytes[0]} ${hash}`);
      }
    }
    const { bench } = await pinned();
    Object.setPrototypeOf(bench.disk, Others.prototype);
    show(bench, 1);
    bench.store.endPin(namespaceNamed('n'), ticket(5), null);
    expect(told).toEqual([]);
    show(bench, 6);
    expect(told).toEqual(['n 6 x0']);
  });
});

describe('a pinned block that leaves the arena before its time', () => {
  it('because it was found wrong is nothing to those who pinned it: its name is free, and the copy below counts at once', async () => {
    const bench = new Bench(64, generous);
    const [prefill, decode] = [bench.engine(), bench.engine()];
    prefill.put(chain('x', 4));
    await bench.answerAll('write', 'stored');
    prefill.holdings.pin(chain('x', 4), 10_000, ticket(1));
    prefill.holdings.pin(chain('x', 2), 10_000);
    decode.holdings.pin(chain('x', 1), 10_000);
    bench.damaged.add('nx0');
    const load = decode.load(chain('x', 4));
    await settled();
    decode.release(load, [0]);
    await settled();
    expect(bench.store.counters.get('release.corrupt.found')).toBe(1);
    expect([decode.lookup(chain('x', 4)).held, decode.holdings.reserve(null, chain('x', 1))[0]!.status]).toEqual([
      4,
      'held',
    ]);
    expect([prefill.holdings.counts.pins, decode.holdings.counts.pins, bench.arena.busySlots]).toEqual([3, 0, 3]);
    bench.store.checkIntegrity();
    // It comes back, and is nobody's pin then.
    const again = decode.load(chain('x', 1));
    await bench.answerAll('read', 'ready');
    decode.release(again);
    expect([bench.arena.busySlots, show(bench, 1), bench.arena.busySlots]).toEqual([3, 2, 1]);
    bench.clock.advance(10_000);
    expect([bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0]);
  });

  it('because it was found wrong stays where an engine reads it, and its name with it, until that is over', async () => {
    const bench = new Bench(64, generous);
    const [prefill, decode] = [bench.engine(), bench.engine()];
    prefill.put(chain('x', 2));
    await bench.answerAll('write', 'stored');
    prefill.holdings.pin(chain('x', 2), 10_000);
    const [reads, finds] = [decode.load(chain('x', 2)), decode.load(chain('x', 2))];
    bench.damaged.add('nx0');
    await settled();
    decode.release(finds, [0]);
    await settled();
    expect([decode.lookup(chain('x', 2)).held, decode.holdings.reserve(null, chain('x', 1))[0]!.status]).toEqual([
      0,
      'busy',
    ]);
    decode.release(reads);
    expect([decode.lookup(chain('x', 2)).held, bench.arena.busySlots]).toEqual([2, 1]);
  });

  it('because its time to live is over can be made again at once', async () => {
    const bench = new Bench(64, generous);
    const [prefill, decode] = [bench.engine('n', { ttlS: 1 }), bench.engine()];
    prefill.put(chain('x', 2));
    await bench.answerAll('write', 'stored');
    prefill.holdings.pin(chain('x', 2), 10_000);
    bench.clock.advance(1_000);
    expect(prefill.holdings.counts.pins).toBe(0);
    expect(decode.put(chain('x', 2))).toEqual(['reserved', 'reserved']);
    await bench.answerAll('write', 'stored');
    expect([decode.lookup(chain('x', 2)).held, bench.arena.busySlots]).toEqual([2, 0]);
    bench.store.checkIntegrity();
  });
});

it('whatever is pinned, shown and unpinned in whatever order, a block stays as long as somebody wants it', {
  timeout: 120_000,
}, async () => {
  const step = fc.oneof(
    fc.record({
      kind: fc.constant('pin' as const),
      session: fc.nat(1),
      first: fc.nat(5),
      count: fc.nat(4),
      ttlMs: fc.integer({ min: 1, max: 6 }),
      number: fc.nat(4),
    }),
    fc.record({ kind: fc.constant('show' as const), number: fc.integer({ min: 1, max: 4 }) }),
    fc.record({ kind: fc.constant('unpin' as const), session: fc.nat(1), first: fc.nat(5) }),
    fc.record({ kind: fc.constant('wait' as const), ms: fc.integer({ min: 1, max: 4 }) }),
  );
  /** Whether it is awaited after a step that all is let go of that nobody wants any more. */
  const life = fc.array(fc.tuple(step, fc.boolean()), { maxLength: 40 });
  /** The ticket of a pin that is over, and whose block waits for the turn to come. */
  const pin = (session: number, number: number) => ({
    ...{ kind: 'pin' as const, session, number },
    ...{ first: 0, count: 0, ttlMs: 1 },
  });
  const overAtOnce = [pin(0, 0), pin(1, 2), { kind: 'wait' as const, ms: 1 }, pin(0, 2)].map(
    (one) => [one, false] as [typeof one, boolean],
  );
  await fc.assert(
    fc.asyncProperty(life, fc.constantFrom(1, 3, 1_024), async (steps, unpinBatchBlocks) => {
      const bench = new Bench(64, { ...generous, unpinBatchBlocks });
      const sessions = [bench.engine(), bench.engine()];
      await stored(bench, sessions[0]!, 'x', 10);
      /** Who wants what until when; number 0: without a ticket. */
      let wants: { session: number; number: number; hash: string; endMs: number }[] = [];
      const shown = new Set<number>();
      /** A ticket is a session's until its time is over, also when none of its blocks is pinned any more. */
      const owners = new Map<number, { session: number; endMs: number }>();
      let nowMs = 0;
      for (const [one, waits] of steps) {
        if (one.kind === 'pin') {
          const { session, first, count, ttlMs, number } = one;
          const hashes = chain('x', count + 1, first);
          const owner = owners.get(number);
          const foreign = owner !== undefined && owner.session !== session && owner.endMs > nowMs;
          const pin = () => sessions[session]!.holdings.pin(hashes, ttlMs, number > 0 ? ticket(number) : undefined);
          if (foreign && !shown.has(number)) {
            expect(pin).toThrow(/another session/);
            continue;
          }
          expect(pin()).toBe(count + 1);
          if (shown.has(number)) continue;
          if (number > 0) owners.set(number, { session, endMs: nowMs + ttlMs });
          wants = wants.filter((want) =>
            number > 0
              ? want.number !== number
              : want.number > 0 || want.session !== session || !hashes.some((hash) => hash === want.hash),
          );
          for (const hash of hashes) wants.push({ session, number, hash, endMs: nowMs + ttlMs });
        } else if (one.kind === 'show') {
          const its = wants.filter(({ number }) => number === one.number);
          wants = wants.filter((want) => want.number !== one.number);
          const isWanted = (session: number, hash: string): boolean =>
            wants.some((want) => want.session === session && want.hash === hash);
          expect(show(bench, one.number)).toBe(its.filter(({ session, hash }) => !isWanted(session, hash)).length);
          shown.add(one.number);
        } else if (one.kind === 'unpin') {
          sessions[one.session]!.holdings.unpin(chain('x', 1, one.first));
          wants = wants.filter((want) => want.session !== one.session || want.hash !== `x${one.first}`);
        } else {
          bench.clock.advance(one.ms);
          nowMs += one.ms;
          wants = wants.filter((want) => want.endMs > nowMs);
        }
        const kept = sessions.map(
          (_, session) => new Set(wants.filter((want) => want.session === session).map(({ hash }) => hash)).size,
        );
        for (const [at, { holdings }] of sessions.entries()) {
          expect(holdings.counts.pins).toBeGreaterThanOrEqual(kept[at]!);
        }
        if (!waits) continue;
        for (let turn = 0; turn < 100 && bench.arena.busySlots > 0; turn++) await settled();
        expect(sessions.map(({ holdings }) => holdings.counts.pins)).toEqual(kept);
        expect(bench.arena.busySlots).toBe(new Set(wants.map(({ hash }) => hash)).size);
      }
      for (const { holdings } of sessions) holdings.end();
      for (let turn = 0; turn < 100; turn++) await settled();
      expect([bench.arena.busySlots, bench.clock.pending]).toEqual([0, 0]);
    }),
    { numRuns: 300, examples: [[overAtOnce, 1]] },
  );
});

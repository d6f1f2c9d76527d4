/** What others' memory, Redis or S3 hold and an engine offers again: kept here too, but never at the cost of what nobody holds. */
import type { HashKey } from '@kvtier/identity';
import { expect, it } from 'vitest';
import type { StoreLimits } from './limits.ts';
import type { OpenOptions } from './parts.ts';
import { inOneTurn, stepping } from './steps.ts';
import { Bench, type BenchOptions, type BlockWriter, chain, namespaceNamed, settled } from './testing/bench.ts';

const n = namespaceNamed('n');

interface Room {
  readonly slots?: number;
  readonly limits?: Partial<StoreLimits>;
  readonly quotas?: BenchOptions['quotas'];
}

function benchOf({ slots = 32, limits = {}, quotas }: Room): Bench {
  return new Bench(slots, limits, { lower: ['disk', 's3'], plans: { disk: { write: 'none' } }, quotas });
}

/** Why each was refused, or what became of it. */
const reserve = ({ holdings }: BlockWriter, hashes: readonly HashKey[], parent: HashKey | null = null): string[] =>
  holdings.reserve(parent, hashes).map(({ status, reason }) => reason || status);
const times = (count: number, word: string): string[] => Array<string>(count).fill(word);
const without = (bench: Bench): number[] =>
  ['quota.refused.arena', 'reserve.refused.quota', 'reserve.refused.no_space', 'reserve.refused.other_size'].map(
    (name) => bench.store.counters.get(name),
  );

it.each([
  {
    what: 'the session may reserve',
    room: { limits: { maxReservedBytes: 6 } },
    taken: 1,
    all: 6,
    end: 'session_limit',
  },
  { what: 'the arena has', room: { slots: 6 }, taken: 1, all: 6, end: 'no_space' },
  { what: 'the tenant may have', room: { quotas: { t: { arena: 4 } } }, taken: 0, all: 4, end: 'quota' },
])('half of what $what stays for what comes before a commit', ({ room, taken, all, end }) => {
  const bench = benchOf(room);
  bench.lower[1]!.put(n, chain('x', 6));
  const engine = bench.engine('n', { tenant: 't' });
  expect(reserve(engine, chain('x', 8))).toEqual([
    ...times(taken, 'reserved'),
    ...times(6 - taken, 'held'),
    ...times(2, 'reserved'),
  ]);
  expect(without(bench)).toEqual([0, 0, 0, 0]);
  for (let block = 8; block < 6 + all - taken; block++)
    expect(reserve(engine, chain('x', 1, block), chain('x', 1, block - 1)[0]!)).toEqual(['reserved']);
  const last = 6 + all - taken;
  expect(reserve(engine, chain('x', 1, last), chain('x', 1, last - 1)[0]!)).toEqual([end]);
});

it('what other sessions have reserved, and what is pinned, counts as much', async () => {
  const bench = benchOf({ slots: 8, limits: { maxPinnedBytes: 8 } });
  const [one, other] = [bench.engine(), bench.engine()];
  bench.lower[1]!.put(n, [...chain('x', 6), ...chain('y', 6)]);
  other.put(chain('z', 2));
  await bench.answerAll('write', 'stored', bench.lower[1]);
  expect(other.holdings.pin(chain('z', 2), 1_000)).toBe(2);
  expect(reserve(other, chain('y', 6))).toEqual([...times(2, 'reserved'), ...times(4, 'held')]);
  expect(reserve(one, chain('x', 7))).toEqual([...times(6, 'held'), 'reserved']);
  other.holdings.end();
  await settled();
  expect(reserve(one, chain('x', 6))).toEqual([...times(3, 'reserved'), ...times(3, 'held')]);
  one.holdings.end();
  bench.store.checkIntegrity();
  // All of it is given back: there is as much room as at first.
  expect(reserve(bench.engine(), chain('x', 6))).toEqual([...times(4, 'reserved'), ...times(2, 'held')]);
});

it('where one has no room the next may have: of another tenant', async () => {
  const bench = benchOf({ quotas: { small: { arena: 2, s3: 100 } } });
  const s3 = bench.lower[1]!;
  const small: OpenOptions = { tenant: 'small' };
  // Its blocks are in s3 alone, and known as its own.
  const owner = bench.engine('n', small);
  for (const hash of chain('x', 3)) {
    owner.put([hash]);
    await bench.answerAll('write', 'stored', s3);
  }
  bench.arena.remove(n, chain('x', 3));
  s3.put(n, chain('x', 3, 3));
  expect(reserve(bench.engine(), chain('x', 7))).toEqual(['reserved', ...times(2, 'held'), ...times(4, 'reserved')]);
  expect(without(bench)).toEqual([0, 0, 0, 0]);
});

it('where one has no room the next may have: of another size', () => {
  const bench = benchOf({});
  const before = bench.store.open(n, 2, 16);
  const slots = before.reserve(null, chain('x', 1)).map(({ slot }) => slot!);
  before.commit(slots, [0n]);
  before.end();
  bench.lower[1]!.put(n, chain('x', 3));
  expect(reserve(bench.engine(), chain('x', 4))).toEqual(['held', ...times(3, 'reserved')]);
});

it('where all of a quota is pinned what others hold stays held, and no refusal is counted', () => {
  const bench = benchOf({ limits: { maxPinnedBytes: 8 }, quotas: { t: { arena: 2 } } });
  const engine = bench.engine('n', { tenant: 't' });
  engine.put(chain('y', 2));
  expect(engine.holdings.pin(chain('y', 2), 1_000)).toBe(2);
  bench.lower[1]!.put(n, chain('x', 4));
  expect(reserve(engine, chain('x', 4))).toEqual(times(4, 'held'));
  expect(without(bench)).toEqual([0, 0, 0, 0]);
  expect(reserve(engine, chain('z', 1))).toEqual(['quota']);
  expect(without(bench)).toEqual([1, 1, 0, 0]);
});

it('what is looked at again is looked at in steps of its own', () => {
  const bench = benchOf({ slots: 8 * stepping.blocks, limits: { maxReservedBytes: 1e6 } });
  const hashes = chain('x', stepping.blocks);
  bench.lower[1]!.put(n, hashes);
  const { counters } = bench.store;
  const steps = bench.engine().holdings.reserving(null, hashes);
  expect([steps.next().done, counters.get('reserve.reserved')]).toEqual([false, 0]);
  expect(inOneTurn(steps).every(({ status }) => status === 'reserved')).toBe(true);
  expect(counters.get('reserve.reserved')).toBe(stepping.blocks);
});

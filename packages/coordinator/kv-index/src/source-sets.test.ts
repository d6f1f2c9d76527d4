/** Sets of holders: what is cleared, and what is collected, costs little at a time however many sets there are. */
import { describe, expect, it } from 'vitest';
import { SourceSets } from './source-sets.ts';

const always = (): boolean => true;
const empty = 0;

/** Of so many sources, who hold nothing twice. */
function setsOf(sources: number): { sets: SourceSets; of: (...holders: readonly number[]) => number } {
  const sets = new SourceSets(sources, 0);
  for (let source = 0; source < sources; source++) sets.admit(source);
  const of = (...holders: readonly number[]): number =>
    holders.reduce((set, holder) => sets.with(set, holder >> 3, holder & 7, always)!, empty);
  return { sets, of };
}
const holder = (source: number, medium: number): number => source * 8 + medium;

describe('what a source held', () => {
  it('is gone at once when it is cleared, at no cost for each set', () => {
    const { sets, of } = setsOf(1_000);
    const numbers = Array.from({ length: 999 }, (_, i) => of(holder(i, 0), holder(999, 0), holder(999, 1)));
    const before = sets.work;
    sets.clear(999, 0);
    sets.clear(3);
    expect(sets.work).toBe(before);
    for (const [i, set] of numbers.entries()) {
      const now = sets.resolve(set);
      expect([sets.mediaOf(now, i), sets.mediaOf(now, 999)]).toEqual([i === 3 ? 0 : 1, 2]);
      // It is settled once.
      const { work } = sets;
      expect(sets.resolve(set)).toBe(now);
      expect(sets.resolve(now)).toBe(now);
      expect(sets.work).toBe(work);
    }
    sets.clear(999);
    expect(sets.resolve(numbers[3]!)).toBe(empty);
  });

  it('is not there again when it holds something anew', () => {
    const { sets, of } = setsOf(64);
    const [both, one] = [of(holder(1, 0), holder(2, 0)), of(holder(1, 0))];
    sets.clear(2);
    const again = sets.with(sets.resolve(one), 2, 0, always)!;
    expect(sets.mediaOf(again, 2)).toBe(1);
    // What it held before is another set than the one of the same holders that was made since, and the same as without it.
    expect(sets.resolve(both)).toBe(sets.resolve(one));
    expect(sets.resolve(again)).toBe(again);
    sets.clear(40); // steps that were taken are forgotten
    expect(of(holder(1, 0), holder(2, 0))).toBe(again);
  });

  it('is out of what is read, and of steps, before anybody has settled the set', () => {
    for (const clears of [1, 1_000]) {
      const { sets, of } = setsOf(64);
      const [three, two] = [of(holder(1, 0), holder(2, 0), holder(3, 4)), of(holder(1, 0), holder(3, 4))];
      for (let i = 0; i < clears; i++) sets.clear(2);
      const { work } = sets;
      expect([1, 2, 3].map((source) => sets.mediaOf(sets.latest(three), source))).toEqual([1, 0, 16]);
      expect(sets.work).toBe(work);
      const more = sets.with(three, 5, 0, always)!;
      expect(more).toBe(sets.with(two, 5, 0, always));
      expect(sets.without(more, 5, 0, always)).toBe(sets.resolve(three));
      expect([sets.isEmpty(three), sets.isEmpty(of(holder(3, 4)))]).toEqual([false, false]);
      sets.clear(1);
      sets.clear(3, 4);
      expect([sets.isEmpty(three), sets.resolve(three)]).toEqual([true, empty]);
    }
  });

  it('leaves no copies', () => {
    const sets = new SourceSets(64, 1);
    const twice = sets.with(sets.with(empty, 1, 0, always)!, 1, 0, always)!;
    const other = sets.with(twice, 2, 0, always)!;
    sets.clear(1);
    expect(sets.without(other, 2, 0, always)).toBe(empty);
    expect(sets.resolve(twice)).toBe(empty);
    expect(sets.without(sets.resolve(other), 2, 0, always)).toBe(empty);
    const once = sets.with(empty, 1, 0, always)!;
    expect(sets.without(once, 1, 0, always)).toBe(empty);
  });
});

describe('sets that nobody names', () => {
  it('are collected one at a time, and rows move together one at a time; those that are named stay', () => {
    const { sets, of } = setsOf(64);
    const numbers: number[] = [];
    for (let a = 0; a < 64; a++) for (let b = 0; b < a; b++) numbers.push(of(holder(a, 0), holder(b, 3)));
    while (sets.collect());
    const kept = numbers.filter((_, i) => i % 7 === 0);
    for (const set of kept) sets.see(set);
    const bitsOf = (): Uint8Array[] => kept.map((set) => sets.bitsOf(sets.resolve(set)).slice());
    const before = { bits: bitsOf(), count: sets.count, bytes: sets.bytes };
    const places = () => kept.map((set) => [sets.slabOf(set), sets.firstOf(set)] as const);
    let were = places();
    for (let { count } = sets; sets.collect(); { count } = sets) {
      expect(count - sets.count).toBeLessThanOrEqual(1);
      const are = places();
      expect(are.filter(([slab, first], i) => slab !== were[i]![0] || first !== were[i]![1]).length).toBeLessThan(2);
      were = are;
    }
    expect(sets.count).toBeLessThan(before.count / 2);
    expect(sets.bytes).toBeLessThan(before.bytes / 2);
    expect(bitsOf()).toEqual(before.bits);
    // Places that are free again are given away once.
    for (const set of kept) sets.see(set);
    const more = numbers.map((_, i) => of(holder(i % 64, 1), holder((i >> 6) % 64, 5), holder((i * 7) % 64, 6)));
    const rows = new Map([...kept, ...more].map((set) => [sets.slabOf(set), new Set<number>()]));
    for (const set of new Set([...kept, ...more])) rows.get(sets.slabOf(set))!.add(sets.firstOf(set));
    expect([...rows.values()].reduce((sum, { size }) => sum + size, 0)).toBe(new Set([...kept, ...more]).size);
    expect(bitsOf()).toEqual(before.bits);
  });

  it('are not taken for what is made while they are collected', () => {
    const { sets, of } = setsOf(64);
    const numbers = Array.from({ length: 60 }, (_, i) => of(holder(i, 0), holder(i + 1, 0)));
    while (sets.collect());
    for (let i = 0; i < 60; i++) sets.collect();
    const last = of(holder(59, 0), holder(60, 0));
    const first = of(holder(0, 0), holder(1, 0));
    expect(last).toBe(numbers[59]);
    while (sets.collect());
    for (const [set, i] of [[last, 59] as const, [first, 0] as const]) {
      expect(sets.exists(set)).toBe(true);
      expect([sets.mediaOf(set, i), sets.mediaOf(set, i + 1)]).toEqual([1, 1]);
    }
  });
});

/** HashIndex over HashRows, against a map of lists. */
import type { HashKey } from '@kvtier/identity';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { HashIndex } from './hash-index.ts';
import { HashRows } from './hash-rows.ts';

const queryOf = (rows: HashRows, key: HashKey) => rows.query({ blockCount: 1, keyAt: () => key }, 0);

/** Few homes, so that clusters meet, wrap around the end of the table and part again; some share all of their first word. */
const keyOf = (number: number): HashKey => {
  const home = number % 3 === 0 ? 62 + (number % 2) : number % 5;
  return `${String.fromCharCode(home)}\0\0\0${String.fromCharCode(number)}`.padEnd(16, '\0') as HashKey;
};

it('equals a map of lists on random operations', () => {
  const operation = fc.record({ add: fc.boolean(), key: fc.nat(60), row: fc.nat(199) });
  fc.assert(
    fc.property(fc.array(operation, { maxLength: 500 }), (operations) => {
      const rows = new HashRows(200);
      const index = new HashIndex(rows);
      const naive = new Map<number, number[]>();
      for (const { add, key, row } of operations) {
        const held = naive.get(key) ?? [];
        if (add && !rows.has(row)) {
          rows.set(row, queryOf(rows, keyOf(key)));
          index.add([row]);
          naive.set(key, [...held, row]);
        } else if (!add && held.length > 0) {
          const gone = held[row % held.length]!;
          index.remove([gone]);
          rows.clear([gone]);
          naive.set(
            key,
            held.filter((other) => other !== gone),
          );
        }
        expect(index.find(queryOf(rows, keyOf(key)))).toBe(naive.get(key)?.[0]);
      }
      index.checkIntegrity();
      for (const [key, held] of naive) expect(index.find(queryOf(rows, keyOf(key)))).toBe(held[0]);
      expect(index.keyCount).toBe([...naive.values()].filter(({ length }) => length > 0).length);
      expect([...index.rows()].sort()).toEqual([...naive.values()].flat().sort());
      index.clear();
      index.checkIntegrity();
      expect(index.keyCount).toBe(0);
    }),
    { numRuns: 300 },
  );
});

it('batches do what single rows do, one after the other', () => {
  const batch = fc.record({
    add: fc.boolean(),
    rows: fc.uniqueArray(fc.nat(199), { maxLength: 100 }),
    keys: fc.infiniteStream(fc.nat(60)),
  });
  fc.assert(
    fc.property(fc.array(batch, { maxLength: 12 }), (batches) => {
      const rows = new HashRows(200);
      const [index, single] = [new HashIndex(rows), new HashIndex(rows)];
      for (const { add, rows: named, keys } of batches) {
        const chosen = named.filter((row) => rows.has(row) !== add);
        if (add) for (const row of chosen) rows.set(row, queryOf(rows, keyOf(keys.next().value)));
        index[add ? 'add' : 'remove'](chosen);
        for (const row of chosen) single[add ? 'add' : 'remove']([row]);
        if (!add) rows.clear(chosen);
        index.checkIntegrity();
        expect(index.keyCount).toBe(single.keyCount);
        for (let key = 0; key <= 60; key++) {
          const query = queryOf(rows, keyOf(key));
          expect(index.find(query)).toBe(single.find(query));
        }
      }
      const chain = { blockCount: 122, keyAt: (at: number) => keyOf(at >> 1) };
      const run: number[] = [];
      for (let at = 1; at < 122; at += 2) {
        const row = index.find(rows.query(chain, at));
        if (row === undefined) break;
        run.push(row);
      }
      expect(index.findRun(chain, 2, 61)).toEqual(run);
    }),
    { numRuns: 300 },
  );
});

it('a removal of what is not there is a defect', () => {
  const rows = new HashRows(8);
  const index = new HashIndex(rows);
  for (const row of [5, 6]) rows.set(row, queryOf(rows, keyOf(1)));
  index.add([5]);
  expect(() => index.remove([6])).toThrow('row 6 is not held under its hash');
});

it('rows keep whole hashes of either width, and know them again', () => {
  const rows = new HashRows(2);
  const wide = 'ÿ123456789abcdefÿ123456789abcdef' as HashKey;
  const narrow = wide.slice(0, 16) as HashKey;
  rows.set(0, queryOf(rows, wide));
  rows.set(1, queryOf(rows, narrow));
  expect([rows.keyOf(0), rows.keyOf(1)]).toEqual([wide, narrow]);
  expect(rows.equals(0, queryOf(rows, narrow))).toBe(false);
  expect(rows.equals(1, queryOf(rows, narrow))).toBe(true);
  const extra = rows.addExtra(1, queryOf(rows, wide));
  expect([rows.blockOf(extra), rows.keyOf(extra), rows.same(extra, 0)]).toEqual([1, wide, true]);
  rows.removeExtra(extra);
  expect(rows.addExtra(0, queryOf(rows, narrow))).toBe(extra);
});

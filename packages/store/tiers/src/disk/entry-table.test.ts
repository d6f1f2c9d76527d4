/** The rows of the disk's index, by their names. */
import { randomFillSync } from 'node:crypto';
import type { HashKey } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { EntryTable, noEntry } from './entry-table.ts';

const rowsAtOnce = 4096 * 64;

it('no block that is added makes it move more than a small part of the others', () => {
  const table = new EntryTable();
  const names = Buffer.alloc(32 * 65_536);
  let largest = 0;
  let before = table.bytes;
  for (let round = 0; round < 4; round++) {
    randomFillSync(names);
    for (let at = 0; at < names.length; at += 32) {
      table.find(1, names.toString('latin1', at, at + 32) as HashKey);
      table.add(1, 1, 1, 1);
      const { bytes } = table;
      largest = Math.max(largest, (bytes - before) % rowsAtOnce);
      before = bytes;
    }
  }
  expect(table.count).toBe(262_144);
  // What grows at once is what is moved at once: 8 bytes of it a block.
  expect(largest).toBeGreaterThan(0);
  expect(largest / 8).toBeLessThan(table.count / 100);
  expect(table.bytes / table.count).toBeLessThan(64 + 16);
});

it('finds what is listed, and nothing else, whatever of it goes', () => {
  const table = new EntryTable();
  const name = (i: number): HashKey => `${i}`.padEnd(i % 3 === 0 ? 8 : 32, 'x') as HashKey;
  const rows = new Map<number, number>();
  for (let i = 0; i < 20_000; i++) {
    expect(table.find(i % 5, name(i))).toBe(noEntry);
    rows.set(i, table.add(i % 5, 1, i, 1));
  }
  for (let i = 0; i < 20_000; i += 2) {
    table.unlist(rows.get(i)!);
    table.release(rows.get(i)!);
    rows.delete(i);
  }
  const words = new Uint32Array(8);
  for (let i = 0; i < 20_000; i++) {
    const row = rows.get(i) ?? noEntry;
    expect(table.find(i % 5, name(i))).toBe(row);
    expect(table.find((i + 1) % 5, name(i))).toBe(noEntry);
    if (row === noEntry) continue;
    expect([table.hash(row), table.page(row), table.namespace(row)]).toEqual([name(i), i, i % 5]);
    expect(table.findWords(i % 5, words, 0, table.copyHash(row, words, 0))).toBe(row);
  }
  expect(table.count).toBe(10_000);
});

/** Rows by their mixes, beside a plain map: whatever comes and goes, each is found, and none that is not there. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { RowSlots } from './row-slots.ts';

/** The row of this mix, as who looks for one does it. */
function find(slots: RowSlots, mix: number): number | undefined {
  const { slots: words, length } = slots.shardOf(mix);
  for (let slot = slots.homeOf(mix, length); words[2 * slot] !== 0; slot = (slot + 1) % length)
    if (words[2 * slot + 1] === mix) return words[2 * slot]! - 1;
  return undefined;
}

// Few homes, at either end of a shard and of all shards: long runs, that go over the end of a shard's slots.
const mixes = fc.oneof(
  fc.integer({ min: -(2 ** 31), max: 2 ** 31 - 1 }),
  fc.nat(60),
  fc.nat(60).map((n) => 0x3fff_ffff - n),
  fc.nat(60).map((n) => -1 - n),
);

it('finds what was added and not removed, and nothing else', () => {
  const steps = fc.array(fc.record({ mix: mixes, isAdded: fc.boolean() }), { maxLength: 400 });
  fc.assert(
    fc.property(steps, (all) => {
      const slots = new RowSlots(2);
      const rows = new Map<number, number>();
      for (const [row, { mix, isAdded }] of all.entries()) {
        const held = rows.get(mix);
        if (isAdded && held === undefined) {
          slots.add(mix, row);
          rows.set(mix, row);
        } else if (!isAdded && held !== undefined) {
          slots.remove(mix, held);
          rows.delete(mix);
        }
      }
      for (const { mix } of all) expect(find(slots, mix)).toBe(rows.get(mix));
      const listed: number[] = [];
      expect(slots.checkIntegrity('test', (row) => listed.push(row))).toBe(rows.size);
      expect(listed.sort()).toEqual([...rows.values()].sort());
      // They go one by one, and shards with them: what is left is found all the while.
      const left = [...rows];
      while (left.length > 0) {
        slots.remove(...left.shift()!);
        for (const [mix, row] of left) expect(find(slots, mix)).toBe(row);
      }
      expect(slots.checkIntegrity('test', () => {})).toBe(0);
      expect(slots.bytes).toBe(new RowSlots(2).bytes);
      slots.clear();
      expect(slots.checkIntegrity('test', () => {})).toBe(0);
    }),
  );
});

it('takes 12 bytes a row, more or less, and its shards do not grow together', () => {
  const slots = new RowSlots(4);
  let most = 0;
  let before = slots.bytes;
  for (let row = 0; row < 100_000; row++) {
    slots.add(Math.imul(row + 1, 0x9e3779b1), row);
    most = Math.max(most, (slots.bytes - before) / slots.bytes);
    before = slots.bytes;
  }
  expect(slots.bytes / 100_000).toBeGreaterThan(10);
  expect(slots.bytes / 100_000).toBeLessThan(16);
  expect(most).toBeLessThan(0.2);
});

it('gives memory back as rows go, a shard at a time; one that comes and goes changes nothing', () => {
  const slots = new RowSlots(4);
  const emptyBytes = slots.bytes;
  const mixOf = (row: number): number => Math.imul(row + 1, 0x9e3779b1);
  const count = 100_000;
  for (let row = 0; row < count; row++) slots.add(mixOf(row), row);
  let [resizes, mostAtOnce, mostOfARow] = [0, 0, 0];
  for (let row = 0; row < count; row++) {
    const before = slots.bytes;
    slots.remove(mixOf(row), row);
    const { bytes } = slots;
    if (bytes !== before) resizes++;
    mostAtOnce = Math.max(mostAtOnce, (before - bytes) / before);
    const left = count - 1 - row;
    if (left >= 1_000) mostOfARow = Math.max(mostOfARow, bytes / left);
    slots.add(mixOf(row), row);
    slots.remove(mixOf(row), row);
    if (slots.bytes !== bytes) resizes = Number.POSITIVE_INFINITY;
  }
  expect(slots.bytes).toBe(emptyBytes);
  expect(resizes).toBeLessThan(16 * 12);
  expect(mostAtOnce).toBeLessThan(0.2);
  expect(mostOfARow).toBeLessThan(41);
  slots.checkIntegrity('test', () => {});
});

it('says which table miscounts', () => {
  const slots = new RowSlots(1);
  slots.add(7, 0);
  slots.shardOf(7).count++;
  expect(() => slots.checkIntegrity('test', () => {})).toThrow('test: a shard miscounts');
});

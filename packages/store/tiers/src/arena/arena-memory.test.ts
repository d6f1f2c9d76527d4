/** ArenaMemory sees the same bytes as the native data plane. */
import { native } from '@kvtier/data-plane';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { TestBench } from '../kit/testing/objects.ts';
import { ArenaMemory } from './arena-memory.ts';

let bench: TestBench;
beforeEach(() => {
  bench = new TestBench(8 << 20);
});
afterEach(() => bench.dispose());

it('reads and writes the arena in place', () => {
  const memory = new ArenaMemory(bench.arena, 8 << 20);
  memory.view(4096, 5).write('hello');
  expect(native.arenaRead(bench.arena, 4096, 5).toString()).toBe('hello');
  native.arenaWrite(bench.arena, (8 << 20) - 3, Buffer.from('end'));
  expect(memory.view((8 << 20) - 3, 3).toString()).toBe('end');
});

it('refuses what lies outside', () => {
  const memory = new ArenaMemory(bench.arena, 8 << 20);
  expect(() => memory.view(0, 10)).toThrow('outside the arena');
  expect(() => memory.view((8 << 20) - 3, 4)).toThrow('outside the arena');
});

it('says which objects are sound, and what is wrong with the others', async () => {
  const { arenaVerify } = native;
  const one = bench.filledObject('one', 10_000);
  const two = bench.filledObject('two', 10_000);
  const three = bench.filledObject('three', 10_000);
  bench.flip(two.slot + 5000);
  const slots = Float64Array.of(one.slot, two.slot, three.slot, one.slot);
  const bytes = Float64Array.of(10_256, 10_256, 9_000, 10_256);
  const identities = Buffer.concat([one, two, three, two].map(({ identity }) => identity));
  expect([...(await arenaVerify(bench.arena, slots, bytes, identities))]).toEqual([0, 8, 7, 6]);
});

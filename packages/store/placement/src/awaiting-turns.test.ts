/** How long a turn of the node takes that has to do with loads which wait: bounded, however long they are and however many. */
import type { HashKey } from '@kvtier/identity';
import { expect, it } from 'vitest';
import { Bench, type BlockWriter, chain, type LoadView } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const longMs = 10_000;
const awaited = (bench: Bench): number => bench.store.stats().counters['await.blocks']!;
const viewOf = (engine: BlockWriter, id: bigint): LoadView => engine.loads.get(id)!;

it('a long load begins 1,024 blocks a turn, and goes on as if it had begun at once', async () => {
  const bench = new Bench(8_192, { maxLeasedBytes: 1e6, maxReservedBytes: 1e6 }, { lower: [] });
  const [prefill, decode] = [bench.engine(), bench.engine()];
  prefill.put(chain('x', 1_500));
  const view = viewOf(decode, decode.load(chain('x', 2_500), longMs, 500));
  const seen = [awaited(bench)];
  for (let turn = 0; turn < 3; turn++) {
    await settled();
    bench.clock.advance(0);
    seen.push(awaited(bench));
  }
  expect(seen).toEqual([0, 548, 1_000, 1_000]);
  await settled();
  expect([view.tiers.length, view.loaded]).toEqual([1_500, -1]);
  prefill.put(chain('x', 1_000, 1_500), 'x1499' as HashKey);
  await settled();
  expect(view).toMatchObject({ loaded: 2_500, reason: '' });
  for (let turn = 0; turn < 40; turn++) bench.clock.advance(0); // what notes the uses of blocks has its turns
  expect(bench.clock.pending).toBe(0);
  const gone = decode.load(chain('y', 2_500), longMs, 500);
  expect(awaited(bench)).toBe(1_024);
  decode.holdings.release(gone, []);
  expect([awaited(bench), bench.clock.pending]).toEqual([0, 0]);
});

it('no turn grows with the number of loads that wait: a commit looks at nobody who waits for something else', () => {
  const [few, apart, many] = shortest(5, [
    () => whileAwaiting(64),
    () => whileAwaiting(512, 16),
    () => whileAwaiting(8_192),
  ]);
  expect(many!.commitsMs).toBeLessThan(4 * few!.commitsMs); // a look at each of them would be more than all else
  expect(many!.endMs).toBeLessThan(5 * apart!.endMs); // as many blocks; by the square of a load's length: 16 times as much
});

/** Of work that is the same each time, one kind after the other: others use this machine, too, and at one time more than at another. */
function shortest<T extends Record<string, number>>(rounds: number, kinds: readonly (() => T)[]): T[] {
  const all = Array.from({ length: rounds }, () => kinds.map((once) => once()));
  const least = (at: number, key: string): number => Math.min(...all.map((one) => one[at]![key]!));
  return all[0]!.map((one, at) => Object.fromEntries(Object.keys(one).map((key) => [key, least(at, key)])) as T);
}

/** Three loads wait for so many blocks each, at each of so many nodes; in CPU time. */
function whileAwaiting(blocks: number, nodes = 1): { readonly commitsMs: number; readonly endMs: number } {
  const all = Array.from({ length: nodes }, () => {
    const bench = new Bench(4, { maxLeasedBytes: 1e6 }, { lower: [] });
    const engines = [bench.engine(), bench.engine(), bench.engine()];
    for (const [at, engine] of engines.entries()) engine.load(chain(`w${at}.`, blocks), longMs, 5_000);
    for (let turn = 0; turn < 8; turn++) bench.clock.advance(0);
    expect(awaited(bench)).toBe(3 * blocks);
    return { bench, engines };
  });
  const { bench } = all[0]!;
  const writer = bench.engine();
  const commitsMs = cpuMsOf(() => {
    for (let n = 0; n < 2_000; n++) writer.put(chain(`other${n}.`, 1));
  });
  expect(awaited(bench)).toBe(3 * blocks);
  const endMs = cpuMsOf(() => {
    for (const { engines } of all) for (const engine of engines) engine.holdings.end();
  });
  expect(awaited(bench)).toBe(0);
  return { commitsMs, endMs };
}

function cpuMsOf(work: () => void): number {
  const { user, system } = process.cpuUsage();
  work();
  const now = process.cpuUsage();
  return (now.user + now.system - user - system) / 1_000;
}

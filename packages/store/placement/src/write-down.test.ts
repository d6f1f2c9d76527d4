/** What becomes of blocks that are still to be written when the store closes. */
import { expect, it } from 'vitest';
import { Bench, chain, namespaceNamed } from './testing/bench.ts';
import { settled } from './testing/model.ts';

const n = namespaceNamed('n');
const answerMs = 500;

/** Chains a, b, ... of eight blocks each, in this order, all of them dirty; the disk takes four blocks at a time. */
function dirty(names: string): Bench {
  const bench = new Bench(64, { writeDownsIdle: 1, maxDirtyBytes: 64 }, { plans: { disk: { write: 'back' } } });
  const engine = bench.engine();
  for (const name of names) {
    engine.put(chain(name, 4));
    engine.put(chain(name, 4, 4), chain(name, 4).at(-1)!);
  }
  expect(bench.store.stats().tiers[1]!.detail.write_dirty_bytes).toBe(8 * names.length);
  return bench;
}

/** The disk answers one write each half second. Returns how long the store took. */
async function closeSlowly(bench: Bench): Promise<number> {
  let isClosed = false;
  const closed = bench.store.close().then(() => {
    isClosed = true;
  });
  let ms = 0;
  for (await settled(); !isClosed; await settled()) {
    bench.clock.advance(answerMs);
    ms += answerMs;
    bench.answer('write', 'stored');
  }
  await closed;
  return ms;
}

const onDisk = (bench: Bench, names: string): number[] =>
  [...names].map((name) => bench.disk.lookup(n, chain(name, 8)));

it('what is to be written back has five seconds; the chains that were used last go first, and of each its beginning', async () => {
  const bench = dirty('abcdefgh');
  // The chain that was committed first is used again.
  const engine = bench.engine();
  const id = engine.load(chain('a', 8));
  await settled();
  engine.release(id);
  expect(await closeSlowly(bench)).toBe(5_000);
  expect(onDisk(bench, 'abcdefgh')).toEqual([8, 0, 0, 0, 8, 8, 8, 8]);
  expect(bench.store.counters.get('writedown.disk.refused.closing')).toBe(24);
});

it('a chain for whose end there is no time is there from its beginning', async () => {
  const bench = dirty('abcdefg');
  const closed = bench.store.close();
  await settled();
  bench.answer('write', 'stored');
  await settled();
  bench.clock.advance(5_000);
  await closed;
  expect(onDisk(bench, 'abcdefg')).toEqual([0, 0, 0, 0, 0, 0, 4]);
});

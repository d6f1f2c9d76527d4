/** A tier that breaks its word: it says that it has read a block, and there is no object. */
import { expect, it } from 'vitest';
import { Bench, chain } from './testing/bench.ts';
import { settled } from './testing/model.ts';

it('it is asked for the block once, also by who awaits it: what it has is gone', async () => {
  const bench = new Bench(8, { awaitRetryMs: 40 }, { lower: ['peer'] });
  const engine = bench.engine();
  const id = engine.load(chain('x', 1), 1_000_000, 500);
  let reads = 0;
  bench.disk.read = async (_, blocks, onDone) => {
    if (++reads > 100) return new Promise(() => {}); // or this test would never end
    for (const index of blocks.keys()) onDone(index, 'ready');
  };
  bench.disk.put(engine.namespace, chain('x', 1));
  await settled();
  expect([reads, bench.disk.lookup(engine.namespace, chain('x', 1))]).toEqual([1, 0]);
  bench.clock.advance(500);
  expect(engine.loads.get(id)).toMatchObject({ loaded: 0, reason: 'awaited' });
  expect(bench.store.counters.get('load.failed.corrupt')).toBe(1);
});

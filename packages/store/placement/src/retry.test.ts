/** Blocks that one tier fails to give are read from the next, also where that one fails before its `read` returns. */
import { expect, it } from 'vitest';
import { Bench, type BlockWriter, chain, namespaceNamed, settled } from './testing/bench.ts';

const none = { write: 'none' } as const;
const threeTiers = (): Bench => {
  const bench = new Bench(16, {}, { lower: ['disk', 'peer', 's3'], plans: { disk: none, peer: none, s3: none } });
  bench.lower[1]!.failsAtOnce = true;
  return bench;
};

/** All reads of the disk fail in one turn, as when it is given up. */
const giveUpDisk = async (bench: Bench): Promise<void> => {
  while (bench.answer('read', 'failed'));
  await settled();
};

/** What is left of loads that are over. */
const left = ({ arena, store }: Bench) => ({
  busySlots: arena.busySlots,
  inFlightBytes: store.stats().counters['fetch.inflight_bytes'],
  ofTiers: store.stats().tiers.map(({ detail }) => detail.read_inflight_bytes ?? 0),
});
const nothing = { busySlots: 0, inFlightBytes: 0, ofTiers: [0, 0, 0, 0] };

const endOf = (engine: BlockWriter, id: bigint) => {
  const { loaded, tiers, reason } = engine.loads.get(id)!;
  return { loaded, tiers, reason };
};

it('that a retry fails at once keeps no other namespace from being read elsewhere', async () => {
  const bench = threeTiers();
  const s3 = bench.lower[2]!;
  const engines = ['n', 'm'].map((name) => bench.engine(name));
  for (const name of ['n', 'm']) for (const tier of bench.lower) tier.put(namespaceNamed(name), chain('x', 1));
  const ids = engines.map((engine) => engine.load(chain('x', 1)));
  await giveUpDisk(bench);
  await bench.answerAll('read', 'ready', s3);
  for (const [at, engine] of engines.entries()) {
    expect(endOf(engine, ids[at]!)).toEqual({ loaded: 1, tiers: ['s3'], reason: '' });
    engine.checkLeases();
  }
  // And what fails later is retried, too.
  const [disk] = bench.lower;
  for (const tier of [disk!, s3]) tier.put(namespaceNamed('n'), chain('y', 1));
  const later = engines[0]!.load(chain('y', 1));
  await giveUpDisk(bench);
  await bench.answerAll('read', 'ready', s3);
  expect(endOf(engines[0]!, later)).toEqual({ loaded: 1, tiers: ['s3'], reason: '' });
  for (const engine of engines) engine.holdings.end();
  await settled();
  expect(left(bench)).toEqual(nothing);
});

it('no block is read twice where others of its namespace are retried in the same turn', async () => {
  const bench = threeTiers();
  const [disk, peer, s3] = bench.lower;
  const engine = bench.engine('n');
  for (const tier of [disk!, s3!]) tier.put(namespaceNamed('n'), chain('x', 2));
  peer!.put(namespaceNamed('n'), chain('x', 1));
  const id = engine.load(chain('x', 2));
  await giveUpDisk(bench);
  expect(s3!.jobs.flatMap(({ hashes }) => hashes).sort()).toEqual(chain('x', 2));
  await bench.answerAll('read', 'ready', s3);
  expect(endOf(engine, id)).toEqual({ loaded: 2, tiers: ['s3', 's3'], reason: '' });
  engine.checkLeases();
  engine.holdings.end();
  await settled();
  expect(left(bench)).toEqual(nothing);
});

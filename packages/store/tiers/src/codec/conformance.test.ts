/** Encoded tiers pass the one suite: a disk under each codec. */
import { join } from 'node:path';
import { ArenaMemory } from '../arena/arena-memory.ts';
import { DiskTier } from '../disk/disk-tier.ts';
import { tierConformance } from '../kit/testing/conformance.ts';
import { silentLog, type TestBench } from '../kit/testing/objects.ts';
import { CodecTier, codecNames } from './codec-tier.ts';

const small = (bench: TestBench) =>
  DiskTier.open({
    dir: join(bench.dir, 'segments'),
    capacityBytes: 2 << 20,
    segmentBytes: 128 << 10,
    arena: bench.arena,
    slots: bench.tier,
    log: silentLog,
    io: { backend: 'threads' },
  });

for (const codec of codecNames) {
  const coded = async (bench: TestBench) =>
    new CodecTier({
      inner: await small(bench),
      codec,
      arena: bench.arena,
      memory: new ArenaMemory(bench.arena, 32 << 20),
      slots: bench.tier,
      nowUs: () => performance.now() * 1000,
    });
  tierConformance(`disk with codec ${codec}`, coded, { persistent: true, runs: 10 });
}

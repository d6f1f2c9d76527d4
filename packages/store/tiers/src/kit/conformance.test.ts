/** The suite itself: a tier among faults passes it, too. */
import { join } from 'node:path';
import { DiskTier } from '../disk/disk-tier.ts';
import { tierConformance } from './testing/conformance.ts';
import { FaultyTier } from './testing/faulty-tier.ts';
import { silentLog, type TestBench } from './testing/objects.ts';

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

const faults = { failRead: 0.2, refuseWrite: 0.2, maxLateTurns: 3 };
for (const seed of [1, 2]) {
  const faulty = async (bench: TestBench) => new FaultyTier(await small(bench), { seed, ...faults });
  tierConformance(`disk among faults, seed ${seed}`, faulty, { persistent: true, faulty: true, runs: 10 });
}

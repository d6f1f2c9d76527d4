/** The peer tier passes the one suite; its nodes are real, in one process, over loopback. */
import { join } from 'node:path';
import { DiskTier } from '../disk/disk-tier.ts';
import { tierConformance } from '../kit/testing/conformance.ts';
import { silentLog, type TestBench } from '../kit/testing/objects.ts';
import { PeerPair, sharedSecret } from './testing/peer-pair.ts';

const disk = (bench: TestBench) =>
  DiskTier.open({
    ...{ dir: join(bench.dir, 'segments'), capacityBytes: 2 << 20, segmentBytes: 128 << 10 },
    ...{ arena: bench.arena, slots: bench.tier, log: silentLog, io: { backend: 'threads' as const } },
  });

tierConformance("peer's arena", (bench) => PeerPair.open(bench, sharedSecret()), {
  persistent: false,
  runs: 10,
});
tierConformance("peer's disk", (bench) => PeerPair.open(bench, sharedSecret(), disk), {
  ...{ persistent: false, runs: 5 },
});

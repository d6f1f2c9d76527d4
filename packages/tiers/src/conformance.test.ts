/** Every tier passes the one suite. */
import { join } from 'node:path';
import { tierConformance } from './conformance.ts';
import { DiskTier } from './disk/disk-tier.ts';
import { silentLog } from './testing/objects.ts';

const disk = (backend: 'io_uring' | 'threads', capacityBytes: number, segmentBytes?: number) =>
  tierConformance(
    `disk, ${backend}, ${capacityBytes >> 10} KiB in segments of ${segmentBytes ?? 'default'}`,
    (bench) =>
      DiskTier.open({
        dir: join(bench.dir, 'segments'),
        capacityBytes,
        segmentBytes,
        arena: bench.arena,
        slots: bench.tier,
        log: silentLog,
        io: { backend },
      }),
    { persistent: true },
  );

// The arena tier hands out the slots that it is tested with.
tierConformance('arena', async (bench) => bench.tier, { persistent: false });
disk('io_uring', 8 << 20);
disk('threads', 8 << 20);
disk('threads', 2 << 20, 128 << 10);

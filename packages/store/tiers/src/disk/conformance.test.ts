/** The disk passes the one suite: both ways of I/O, several devices, every policy. */
import { join } from 'node:path';
import { tierConformance } from '../kit/testing/conformance.ts';
import { silentLog, type TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';

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

disk('io_uring', 8 << 20);
disk('threads', 8 << 20);
disk('threads', 2 << 20, 128 << 10);

const striped = (bench: TestBench) =>
  DiskTier.open({
    dirs: ['a', 'b', 'c'].map((name) => join(bench.dir, name)),
    capacityBytes: 6 << 20,
    segmentBytes: 128 << 10,
    policy: 'fifo',
    arena: bench.arena,
    slots: bench.tier,
    log: silentLog,
    io: { backend: 'threads' },
  });
// Under FIFO what is used stays because it is carried over.
tierConformance('disk, striped over three devices, fifo', striped, { persistent: true, runs: 3 });
for (const policy of ['lfu', 's3-fifo'] as const) {
  const open = (bench: TestBench) =>
    DiskTier.open({
      dir: join(bench.dir, 'segments'),
      capacityBytes: 2 << 20,
      segmentBytes: 128 << 10,
      policy,
      arena: bench.arena,
      slots: bench.tier,
      log: silentLog,
      io: { backend: 'threads' },
    });
  tierConformance(`disk, ${policy}`, open, { persistent: true, runs: 3 });
}

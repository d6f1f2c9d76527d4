/** Every tier passes the one suite. */
import { join } from 'node:path';
import { ArenaMemory } from '../arena/arena-memory.ts';
import { CodecTier, codecNames } from '../codec/codec-tier.ts';
import { DiskTier } from '../disk/disk-tier.ts';
import { tierConformance } from './testing/conformance.ts';
import { FaultyTier } from './testing/faulty-tier.ts';
import { silentLog, type TestBench } from './testing/objects.ts';

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

const faults = { failRead: 0.2, refuseWrite: 0.2, maxLateTurns: 3 };
for (const seed of [1, 2]) {
  const faulty = async (bench: TestBench) => new FaultyTier(await small(bench), { seed, ...faults });
  tierConformance(`disk among faults, seed ${seed}`, faulty, { persistent: true, faulty: true, runs: 10 });
}

// The arena tier hands out the slots that it is tested with.
tierConformance('arena', async (bench) => bench.tier, { persistent: false });
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

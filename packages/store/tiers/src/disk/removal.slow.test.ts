/**
 * A whole tier that is removed within a second, on a disk that stalls for 9 s, below its time limit: a frozen file system on a
 * loop device, which needs root. What it costs is counted in a process of its own, which dies by SIGKILL at the end.
 */
import { type ChildProcess, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';

vi.setConfig({ testTimeout: 120_000 });

const [program] = await bundled(new URL('../kit/testing/mass-removal.ts', import.meta.url));
const segmentBytes = 16 << 20;
let folder: string;
let mount: string;
let mounted: boolean;
let child: ChildProcess | undefined;

const run = (command: string, ...args: string[]): boolean => spawnSync(command, args).status === 0;

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-removal-'));
  mount = join(folder, 'disk');
  mkdirSync(mount);
  const image = join(folder, 'image');
  writeFileSync(image, '');
  truncateSync(image, 512 << 20);
  mounted = run('mkfs.ext4', '-q', '-O', '^has_journal', image) && run('mount', '-o', 'loop', image, mount);
  if (!mounted) console.warn('SKIPPED: a disk that stalls: no loop devices, or no right to mount; run as root');
});
afterEach(() => {
  if (mounted) run('fsfreeze', '-u', mount);
  child?.kill('SIGKILL');
  child = undefined;
  if (mounted) expect(run('umount', mount) || run('umount', '-l', mount)).toBe(true);
  rmSync(folder, { recursive: true });
});

interface Report {
  /** The three longest turns of the event loop, in processor time, less what new pages cost on this machine alone. */
  readonly longestMs: readonly number[];
  readonly descriptors: number;
  readonly calls: number;
  readonly outOfService: number;
  readonly left: number;
  readonly told: readonly string[];
}

/** Fills, freezes the disk, removes, lets it go; `keepEvery`: of so many blocks one stays, 0: none. */
async function removal(blocks: number, keepEvery: number, stallMs: number): Promise<Report> {
  const settings = { dir: join(mount, 'segments'), blocks, segmentBytes, keepEvery };
  const started = spawn(process.execPath, [program], {
    env: { ...process.env, KVTIER_TEST: JSON.stringify(settings) },
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  child = started;
  let said = '';
  started.stdout.on('data', (bytes) => (said += bytes));
  const ended = new Promise((resolve) => started.once('close', resolve));
  await vi.waitUntil(() => said.includes('filled\n') || started.exitCode !== null, { timeout: 90_000 });
  // A process of its own ends it: no wait of this one makes it longer.
  const seconds = stallMs / 1_000;
  const stall = spawn('sh', ['-c', `fsfreeze -f "$0" && echo frozen && sleep ${seconds}; fsfreeze -u "$0"`, mount]);
  const stalled = once(stall, 'exit');
  await Promise.race([once(stall.stdout, 'data'), stalled]);
  started.stdin.write('remove\n');
  expect(await stalled).toEqual([0, null]);
  await ended;
  const report = JSON.parse(said.split('\n')[1]!) as Report;
  console.info(JSON.stringify(report));
  return report;
}

it.each([
  ['all', 40_000, 0, 9_000],
  ['six of seven', 15_000, 7, 2_000],
] as const)('%s of %i blocks go at once, and for good', async (_, blocks, keepEvery, stallMs) => {
  if (!mounted) return;
  const report = await removal(blocks, keepEvery, stallMs);
  const left = keepEvery === 0 ? 0 : Math.ceil(blocks / keepEvery);
  expect(report).toMatchObject({ left, outOfService: 0, told: [] });
  expect(report.descriptors).toBeLessThan(256);
  expect(report.calls).toBeLessThanOrEqual(8);
  // Time that the hypervisor takes away counts as ours; what is ours would show more than twice.
  expect(report.longestMs[2] ?? 0).toBeLessThan(50);
  const bench = new TestBench();
  const tier = await DiskTier.open({
    ...{ dir: join(mount, 'segments'), capacityBytes: 480 << 20, segmentBytes },
    ...{ arena: bench.arena, slots: bench.tier, log: silentLog },
  });
  expect(tier.stats().blocks).toBe(left);
  if (keepEvery > 0) {
    const space = namespaceNamed('removal');
    const kept = Array.from({ length: 50 }, (_, i) => hashNamed(i * keepEvery));
    expect(await bench.read(tier, space, kept, 3_800)).toEqual(kept.map(() => 'ready'));
  }
  tier.checkIntegrity();
  await tier.close();
  bench.dispose();
});

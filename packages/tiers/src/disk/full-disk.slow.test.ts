/**
 * A file system that is full: the tier goes out of service with the reason; when there is room again, it comes back by itself
 * with what it held.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../testing/objects.ts';
import { DiskTier } from './disk-tier.ts';

const payloadBytes = 60_000;
const space = namespaceNamed('full');
let bench: TestBench;
let mount: string;
let mounted: boolean;

beforeEach(() => {
  bench = new TestBench();
  mount = join(bench.dir, 'small');
  mkdirSync(mount);
  mounted = spawnSync('mount', ['-t', 'tmpfs', '-o', 'size=6m', 'kvtier-test', mount]).status === 0;
});
afterEach(() => {
  if (mounted) expect(spawnSync('umount', [mount]).status).toBe(0);
  bench.dispose();
});

it('goes out of service on ENOSPC, and comes back when there is room', async (context) => {
  if (!mounted) {
    console.warn('SKIPPED: the full disk is not tested: mount needs root');
    context.skip();
  }
  const reasons: string[] = [];
  // Three segments: one to write to and one made ahead of need would else fill the disk again while it is looked at.
  writeFileSync(join(mount, 'somebody-elses'), Buffer.alloc(3 << 20));
  const options = { dir: join(mount, 'segments'), capacityBytes: 16 << 20, segmentBytes: 1 << 20 };
  const make = () =>
    DiskTier.open({
      ...{ ...options, arena: bench.arena, slots: bench.tier, log: silentLog },
      onOutOfService: (reason) => reasons.push(reason),
      // Long after what is looked at below, so that it does not come back in between.
      retry: { firstMs: 2_000, longestMs: 2_000 },
    });
  const tier = await make();
  const hashes = Array.from({ length: 60 }, (_, i) => hashNamed(i));
  const statuses: string[] = [];
  for (let from = 0; from < 60 && !statuses.includes('refused'); from += 4) {
    statuses.push(...(await bench.write(tier, space, hashes.slice(from, from + 4), payloadBytes)));
  }
  const storedCount = statuses.indexOf('refused');
  expect(storedCount).toBeGreaterThan(0);
  expect(reasons).toHaveLength(1);
  expect(reasons[0]).toMatch(/no space for 1048576 bytes \(No space left on device\)/);
  expect(tier.stats()).toMatchObject({ inService: false, outOfServiceReason: reasons[0] });
  expect(tier.lookup(space, hashes)).toBe(0);
  rmSync(join(mount, 'somebody-elses'));
  await vi.waitUntil(() => tier.stats().inService, { timeout: 20_000, interval: 10 });
  // Writes in flight at that moment were refused, to be safe, although they may have arrived.
  expect(tier.lookup(space, hashes)).toBeGreaterThanOrEqual(storedCount);
  expect(await bench.write(tier, space, [hashNamed('new')], payloadBytes)).toEqual(['stored']);
  tier.checkIntegrity();
  await tier.close();
  const again = await make();
  expect(again.lookup(space, hashes)).toBeGreaterThanOrEqual(storedCount);
  await again.close();
});

/**
 * The disk is full before its cap is reached: the disk tier goes on with the files that it has and says so, nothing wrong is
 * served. A small tmpfs stands in for the disk, so this needs the right to mount.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, rmSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { NodeRig } from './node-rig.ts';

const mountBytes = 24 << 20;
let rig: NodeRig;
let mounted = false;
beforeEach(() => {
  rig = new NodeRig({ diskBytes: 256 << 20 });
  mkdirSync(rig.dataDir);
  const mount = spawnSync('mount', ['-t', 'tmpfs', '-o', `size=${mountBytes}`, 'kvtier-test', rig.dataDir]);
  mounted = mount.status === 0;
  if (!mounted) console.warn(`SKIPPED: full disk: mount is not permitted here (${mount.stderr}); run as root`);
});
afterEach(async () => {
  if (rig.child?.exitCode === null && rig.child.signalCode === null) await rig.stop('SIGKILL');
  if (mounted) spawnSync('umount', [rig.dataDir]);
  await rig.dispose();
});

it('full from the start: one clear line and no node', async (context) => {
  if (!mounted) context.skip();
  writeFileSync(path.join(rig.dataDir, 'somebody-elses'), Buffer.alloc(mountBytes - (1 << 20)));
  await expect(rig.start({ config: { disk: { bytes: 64 << 20, segmentBytes: 8 << 20 } } })).rejects.toThrow(
    /^cache-node: (IO|CAPACITY|SETUP): /,
  );
  expect(rig.stderr.trim().split('\n').length).toBe(1);
});

it('full while it runs: the tier goes on with what space it has, and says so', async (context) => {
  if (!mounted) context.skip();
  await rig.start({ config: { disk: { bytes: 256 << 20, segmentBytes: 4 << 20 } } });
  const engine = await rig.attach();
  for (let round = 0; round < 40; round++) {
    await engine.put(`c${round}`, 16);
    const { loaded } = await engine.load(`c${round}`, 16);
    expect(loaded).toBe(16);
  }
  await vi.waitUntil(() => /no space left for more files/.test(rig.stderr), { timeout: 60_000 });
  const disk = (await engine.stats()).tiers.find(({ tier }) => tier === 'disk')!;
  expect(disk).toMatchObject({ inService: true, outOfServiceReason: '' });
  expect(Number(disk.blocks)).toBeGreaterThan(0);
  expect(Number(disk.bytes)).toBeLessThan(mountBytes);
  await engine.put('after', 16);
  expect(await engine.load('after', 16)).toMatchObject({ loaded: 16, reason: '' });
  await engine.end();
  expect((await rig.stop()).signal).toBeNull();

  // With room again, a new life is whole.
  rmSync(path.join(rig.dataDir, 'segments'), { recursive: true, force: true });
  await rig.start({ config: { disk: { bytes: 16 << 20, segmentBytes: 4 << 20 } } });
  const again = await rig.attach();
  await again.put('new', 8);
  expect((await again.stats()).tiers.every(({ inService }) => inService)).toBe(true);
  await again.end();
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
});

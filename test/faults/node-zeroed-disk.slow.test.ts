/**
 * The disk below a whole node forgets what it held and says nothing: a loop device whose file lost its end reads zeros. Under load: no
 * request fails, no wrong block is served, never more bytes than the cap, and what is written anew is served. (EIO, ENOSPC and
 * hanging devices: packages/tiers/src/disk/device.test.ts and node-full-disk.slow.test.ts.)
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, rmSync, truncateSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { NodeLoad, tierOf } from './node-load.ts';
import { NodeRig } from './node-rig.ts';

const imageBytes = 96 << 20;
const diskBytes = 32 << 20;
let rig: NodeRig;
let image: string;
let reason = '';
beforeEach(() => {
  rig = new NodeRig({ diskBytes });
  mkdirSync(rig.dataDir);
  image = path.join(rig.folder, 'image');
  writeFileSync(image, '');
  truncateSync(image, imageBytes);
  reason = '';
  for (const command of [
    ['mkfs.ext4', '-q', '-E', 'lazy_itable_init=0,nodiscard', '-O', '^has_journal', image],
    ['mount', '-o', 'loop,errors=continue', image, rig.dataDir],
  ]) {
    const done = spawnSync(command[0]!, command.slice(1), { encoding: 'utf8' });
    if (done.status !== 0) reason ||= `${command[0]}: ${done.error?.message ?? done.stderr.trim()}`;
  }
  if (reason !== '') console.warn(`SKIPPED: a zeroed disk below a node: ${reason}; run as root with loop devices`);
});
afterEach(async () => {
  if (rig.child?.exitCode === null && rig.child.signalCode === null) await rig.stop('SIGKILL');
  if (reason === '') spawnSync('umount', ['-l', rig.dataDir]);
  rmSync(image, { force: true });
  await rig.dispose();
});

it('zeros where blocks were, under load', async (context) => {
  if (reason !== '') return context.skip();
  await rig.start({ config: { arena: { bytes: 4 << 20 }, disk: { bytes: diskBytes, segmentBytes: 4 << 20 } } });
  const ask = await rig.attach();
  const engines = [await rig.attach(), await rig.attach()];
  const load = new NodeLoad(engines, 20);
  await load.servedFrom('disk');
  truncateSync(image, 4 << 20);
  truncateSync(image, imageBytes);
  await load.until(async () => (await tierOf(ask, 'disk')).corrupt > 0n, 'corrupt blocks');
  await load.servedFrom('disk');
  await load.more(20);
  await load.stop();
  const disk = await tierOf(ask, 'disk');
  expect(disk.inService).toBe(true);
  expect(disk.bytes).toBeLessThanOrEqual(BigInt(diskBytes));
  expect(rig.diskUsage).toBeLessThanOrEqual(diskBytes + (1 << 20));
  for (const engine of [ask, ...engines]) await engine.end();
});

/**
 * The disk below a whole node goes bad under load: it forgets what it held and says nothing, or it answers EIO to everything, and is
 * repaired. No request fails, no wrong block is served, never more bytes than the cap, and without a restart the disk serves again
 * what is written anew. (ENOSPC: node-full-disk.slow.test.ts; devices that hang, one of several: packages/store/tiers/src/disk/device.test.ts.)
 */
import { mkdirSync } from 'node:fs';
import path from 'node:path';
import { byLaw } from '@kvtier/tiers/testing';
import { afterEach, expect, it, type TestContext } from 'vitest';
import { LoopDisk } from './loop-disk.ts';
import { NodeLoad, tierOf } from './node-load.ts';
import { type NodeClient, NodeRig } from './node-rig.ts';

const diskBytes = 32 << 20;
let rig: NodeRig | undefined;
let disk: LoopDisk | undefined;
afterEach(async () => {
  if (rig?.child?.exitCode === null && rig.child.signalCode === null) await rig.stop('SIGKILL');
  disk?.unmount();
  await rig?.dispose();
  rig = undefined;
  disk = undefined;
});

/** A node under load whose disk tier serves; `act` breaks it. Afterwards it serves again, within its cap. */
async function underLoad(
  context: TestContext,
  missed: string,
  act: (disk: LoopDisk, load: NodeLoad, ask: NodeClient) => Promise<void>,
): Promise<void> {
  const node = new NodeRig({ diskBytes });
  rig = node;
  mkdirSync(node.dataDir);
  const device = LoopDisk.mount(path.join(node.folder, 'image'), node.dataDir, missed);
  if (device === undefined) return context.skip();
  disk = device;
  await node.start({ config: { arena: { bytes: 4 << 20 }, disk: { bytes: diskBytes, segmentBytes: 4 << 20 } } });
  const ask = await node.attach();
  const engines = [await node.attach(), await node.attach()];
  const load = new NodeLoad(engines, 20);
  await load.servedFrom('disk');
  await act(device, load, ask);
  await load.servedFrom('disk');
  await load.more(20);
  await load.stop();
  const { inService, bytes } = await tierOf(ask, 'disk');
  expect(inService).toBe(true);
  byLaw(3, () => {
    expect(bytes).toBeLessThanOrEqual(BigInt(diskBytes));
    expect(node.diskUsage).toBeLessThanOrEqual(diskBytes + (1 << 20));
  });
  for (const engine of [ask, ...engines]) await engine.end();
}

it('zeros where blocks were', async (context) => {
  await underLoad(context, 'a disk that reads zeros', async (device, load, ask) => {
    device.forget();
    await load.until(async () => (await tierOf(ask, 'disk')).corrupt > 0n, 'corrupt blocks');
  });
});

it('EIO: out of service, in so many words, until the device works again', async (context) => {
  await underLoad(context, 'a disk that answers EIO', async (device, load, ask) => {
    device.breakDown();
    await load.until(async () => !(await tierOf(ask, 'disk')).inService, 'out of service');
    // A write of which a part had arrived is told as short.
    expect((await tierOf(ask, 'disk')).outOfServiceReason).toMatch(
      /failed \((errno 5|only \d+ of)|Input\/output error/,
    );
    await load.more(20);
    device.repair();
    await load.until(async () => (await tierOf(ask, 'disk')).inService, 'in service');
  });
});

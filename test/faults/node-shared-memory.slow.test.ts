/** Two containers with volumes of their own at the same path and one /dev/shm: neither touches what is the other's. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdirSync } from 'node:fs';
import path from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { NodeRig } from './node-rig.ts';

const mayUnshare = spawnSync('unshare', ['-m', 'true']).status === 0;
if (!mayUnshare) process.stderr.write('node-shared-memory: unshare -m is not permitted here; run it as root\n');

let rigs: NodeRig[];
beforeEach(() => {
  rigs = [new NodeRig(), new NodeRig()];
});
afterEach(async () => {
  for (const rig of rigs) await rig.dispose();
});

it.skipIf(!mayUnshare)('both serve, engines attach to both, and a killed one comes back beside the other', async () => {
  const shared = path.join(rigs[0]!.folder, 'var');
  mkdirSync(shared);
  const start = async (rig: NodeRig): Promise<void> => {
    mkdirSync(rig.dataDir, { recursive: true });
    const mount = `mount --bind ${rig.dataDir} ${shared} && exec "$@"`;
    await rig.start({ prefix: ['unshare', '-m', 'sh', '-c', mount, 'sh'], config: { dataDir: shared } });
  };
  for (const rig of rigs) await start(rig);
  const [first, second] = rigs as [NodeRig, NodeRig];
  for (const rig of rigs) {
    expect(existsSync(rig.arenaPath)).toBe(true);
    const engine = await rig.attach();
    expect(await engine.put('a', 8)).toBe(8);
    expect((await engine.load('a', 8)).loaded).toBe(8);
    await engine.end();
  }
  const dead = second.arenaPath;
  await second.stop('SIGKILL');
  await start(second);
  expect([existsSync(first.arenaPath), existsSync(dead), existsSync(second.arenaPath)]).toEqual([true, false, true]);
  for (const rig of rigs) {
    expect(rig.arenaFiles).toEqual([path.basename(rig.arenaPath)]);
    expect(await rig.stop()).toEqual({ code: 0, signal: null });
    expect(rig.arenaFiles).toEqual([]);
  }
});

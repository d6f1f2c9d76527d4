/** What cannot work at the start is one clear line and exit code 78, or 1 where another start may do better; a node in use is left alone. */
import { chmodSync, chownSync, existsSync, mkdirSync, writeFileSync } from 'node:fs';
import path from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { NodeRig } from './node-rig.ts';

const nobody = 65_534;
let rig: NodeRig;
beforeEach(() => {
  rig = new NodeRig();
});
afterEach(() => rig.dispose());

const refusals: readonly [string, (rig: NodeRig) => object, RegExp, number?][] = [
  ['an unknown key', () => ({ colour: 1 }), /^cache-node: CONFIG: .*colour/, 78],
  ['an arena larger than shared memory', () => ({ arena: { bytes: 2 ** 50 } }), /^cache-node: [A-Z]+: .*arena|shm/],
  [
    'no folder for the arena',
    () => ({ arena: { bytes: 1 << 24, dir: '/nowhere' } }),
    /^cache-node: CONFIG: .*\/nowhere/,
    1, // it may be mounted yet
  ],
  ['a disk cap that is too small', () => ({ disk: { bytes: 1000 } }), /^cache-node: CONFIG: .*disk\.bytes/, 78],
  [
    'a data folder that is a file',
    ({ folder, dataDir }) => {
      writeFileSync(dataDir, '');
      return { dataDir: path.join(folder, 'data') };
    },
    /^cache-node: SETUP: .*dataDir/,
  ],
];

it.each(refusals)('%s', async (_what, prepare, line, code = 1) => {
  const config = prepare(rig);
  const failed = rig.start({ config });
  await expect(failed).rejects.toThrow(line);
  expect(rig.stderr.trim().split('\n').length).toBe(1);
  expect(await rig.exit).toEqual({ code, signal: null });
  expect(existsSync(rig.socketPath)).toBe(false);
});

it('a data folder, or a socket, that another node serves is LOCKED, and that node goes on', async () => {
  await rig.start();
  const engine = await rig.attach();
  await engine.put('a', 4);
  const [child, exit, arenaPath] = [rig.child, rig.exit, rig.arenaPath];
  await expect(rig.start({ config: { socketPath: path.join(rig.folder, 'other.sock') } })).rejects.toThrow(
    /LOCKED: .*dataDir/,
  );
  await expect(rig.start({ config: { dataDir: path.join(rig.folder, 'other') } })).rejects.toThrow(/LOCKED: .*socket/);
  Object.assign(rig, { child, exit, arenaPath });
  expect(existsSync(arenaPath)).toBe(true);
  expect((await engine.load('a', 4)).loaded).toBe(4);
  await engine.end();
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
});

it('a data folder without permission', async () => {
  mkdirSync(rig.dataDir);
  chmodSync(rig.dataDir, 0o500);
  // Root may write everywhere, so it is somebody else then.
  const isRoot = process.getuid!() === 0;
  if (isRoot) for (const folder of [rig.folder, rig.dataDir]) chownSync(folder, nobody, nobody);
  const started = rig.start(
    isRoot ? { prefix: ['setpriv', `--reuid=${nobody}`, `--regid=${nobody}`, '--clear-groups'] } : {},
  );
  await expect(started).rejects.toThrow(/^cache-node: (SETUP|IO): .*data/);
});

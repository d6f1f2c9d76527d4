/**
 * A node that starts while one of its two disks is mounted read-only, or not at all: it serves with the other one, writes nothing where
 * the disk is not, and has it back with its blocks without a restart. File systems in memory stand in for disks; to mount needs root.
 */
import { spawnSync } from 'node:child_process';
import { mkdirSync, readdirSync } from 'node:fs';
import path from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { tierOf } from './node-load.ts';
import { type NodeClient, NodeRig } from './node-rig.ts';

const patience = { timeout: 60_000, interval: 100 };
const blocks = 24;
const chains = ['c0', 'c1', 'c2', 'c3'];
let rig: NodeRig;
let mounts: string[];
beforeEach((context) => {
  rig = new NodeRig();
  mounts = [];
  for (const name of ['one', 'two']) {
    mkdirSync(at(name));
    mkdirSync(at(`${name}-device`));
    if (mounted(at(`${name}-device`), '-t', 'tmpfs', '-o', 'size=64m', 'kvtier-test')) {
      expect(mounted(at(name), '--bind', at(`${name}-device`))).toBe(true);
      continue;
    }
    console.warn(
      'SKIPPED: nodes with disks that are read-only or not mounted: mount is not permitted here; run as root',
    );
    context.skip();
  }
});
afterEach(async () => {
  if (rig.child?.exitCode === null && rig.child.signalCode === null) await rig.stop('SIGKILL');
  for (const each of mounts.reverse()) spawnSync('umount', ['--lazy', each]);
  await rig.dispose();
});

const at = (name: string): string => path.join(rig.folder, name);
const remounted = (how: string): void => expect(spawnSync('mount', ['-o', how, at('two')]).status).toBe(0);
function mounted(where: string, ...how: string[]): boolean {
  const isMounted = spawnSync('mount', [...how, where]).status === 0;
  if (isMounted) mounts.push(where);
  return isMounted;
}

const config = (): object => ({
  disk: { bytes: 64 << 20, segmentBytes: 4 << 20, dirs: [at('one/kvtier'), at('two/kvtier')] },
  placement: { disk: { settleMs: 0 } },
});
const outOf = async (engine: NodeClient): Promise<unknown> =>
  (await tierOf(engine, 'disk')).detail.devices_out_of_service;
const heldOf = async (engine: NodeClient): Promise<number> => Number((await tierOf(engine, 'disk')).blocks);

/** A life of the node in which both disks come to hold blocks. */
async function filled(): Promise<number> {
  await rig.start({ config: config() });
  const engine = await rig.attach();
  for (const chain of chains) expect(await engine.put(chain, blocks)).toBe(blocks);
  await vi.waitUntil(async () => (await heldOf(engine)) === chains.length * blocks, patience);
  await engine.end();
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
  for (const name of ['one', 'two']) expect(readdirSync(at(`${name}/kvtier`))).toContain('segment-00000001.kvs');
  return chains.length * blocks;
}

it.each([
  [
    'read-only',
    () => remounted('remount,ro,bind'),
    () => remounted('remount,rw,bind'),
    /two\/kvtier\/lock: cannot be opened \(Read-only file system\)/,
  ],
  [
    'not mounted',
    () => {
      expect(spawnSync('umount', [at('two')]).status).toBe(0);
      expect(readdirSync(at('two'))).toEqual([]);
    },
    () => {
      expect(readdirSync(at('two'))).toEqual([]);
      expect(mounted(at('two'), '--bind', at('two-device'))).toBe(true);
    },
    /two\/kvtier: is not mounted: before, it lay on what was mounted at \S+two; .*disk-mounts\.json/,
  ],
])('%s', async (_, breakDown, repair, why) => {
  const held = await filled();
  breakDown();
  await rig.start({ config: config() });
  const engine = await rig.attach();
  expect(await outOf(engine)).toBe(1);
  expect(await tierOf(engine, 'disk')).toMatchObject({ inService: true });
  expect(rig.stderr).toMatch(why);
  const half = await heldOf(engine);
  expect(half).toBeGreaterThan(0);
  expect(half).toBeLessThan(held);
  repair();
  await vi.waitUntil(async () => (await outOf(engine)) === 0, patience);
  expect(await heldOf(engine)).toBe(held);
  await engine.end();
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
});

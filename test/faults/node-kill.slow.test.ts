/**
 * The node is killed at every step of a store, and at moments of its own choosing: what is served afterwards is right,
 * the cap holds, and the arena of the former life is gone.
 */
import { existsSync } from 'node:fs';
import { byLaw } from '@kvtier/tiers/testing';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { type NodeClient, NodeRig } from './node-rig.ts';

const chainBlocks = 24;
let rig: NodeRig;
beforeEach(() => {
  rig = new NodeRig();
});
afterEach(() => rig.dispose());

/** With the lock files of the node and of the folder. */
const withinCap = (): void => byLaw(3, () => expect(rig.diskUsage).toBeLessThanOrEqual(rig.diskBytes! + 8192));

/** Put and load chains until the node is gone; returns the chains that it was offered, with their block counts. */
async function workUntilDeath(engine: NodeClient, life = 0): Promise<Map<string, number>> {
  const offered = new Map<string, number>();
  try {
    for (let round = 0; round < 200; round++) {
      const name = `${life}.${round}`;
      for (let first = 0; first < chainBlocks; first += 8) {
        offered.set(name, first + 8); // the node may die between taking a commit over and answering it
        await engine.put(name, 8, first);
      }
      await engine.load(`${life}.${round >> 1}`, chainBlocks);
    }
  } catch (error) {
    if ((error as Error).message !== 'the connection ended') throw error;
    return offered;
  }
  throw new Error('the node survived');
}

/** A fresh node over the same folder: everything it serves is right. Returns the blocks that it serves. */
async function checkAfterwards(offered: ReadonlyMap<string, number>, life = 0): Promise<number> {
  const before = rig.arenaPath;
  await rig.start();
  expect(existsSync(before)).toBe(false);
  expect(rig.arenaFiles.length).toBe(1);
  withinCap();
  const engine = await rig.attach();
  let served = 0;
  for (const name of [...offered.keys(), 'never-put']) {
    const { held } = await engine.lookup(name, chainBlocks);
    expect(held).toBeLessThanOrEqual(offered.get(name) ?? 0);
    const { loaded, reason } = await engine.load(name, chainBlocks);
    if (reason !== 'corrupt') expect(loaded).toBe(held); // torn at the moment of death: found, counted, removed
    served += loaded;
  }
  expect(await engine.put(`after${life}`, chainBlocks)).toBe(chainBlocks);
  expect(await engine.load(`after${life}`, chainBlocks)).toMatchObject({ loaded: chainBlocks, reason: '' });
  withinCap();
  await engine.end();
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
  expect(existsSync(rig.socketPath)).toBe(false);
  expect(rig.arenaFiles).toEqual([]);
  return served;
}

it.each([
  'store.reserve.allocated:kill:30',
  'store.commit.before:kill:5',
  'store.commit.published:kill:1',
  'store.commit.published:kill:61',
  'store.writedown.before:kill:9',
  'store.writedown.after:kill:9',
  'store.load.read:kill:1',
  'store.load.published:kill:3',
])('killed at %s', async (fault) => {
  await rig.start({ fault });
  const engine = await rig.attach();
  const offered = await workUntilDeath(engine);
  expect(await rig.exit).toEqual({ code: null, signal: 'SIGKILL' });
  await engine.end();
  const served = await checkAfterwards(offered);
  if (/writedown.after|load/.test(fault)) expect(served).toBeGreaterThan(0); // it is not right for want of anything
});

it('the cap holds at every moment while the disk turns over, and after SIGKILL', async () => {
  await rig.start();
  const engine = await rig.attach();
  const offered = new Map<string, number>();
  for (let round = 0; round < 60; round++) {
    offered.set(`r${round}`, await engine.put(`r${round}`, chainBlocks));
    expect((await engine.load(`r${round >> 1}`, chainBlocks)).reason).toMatch(/^(missing)?$/);
    withinCap();
  }
  const disk = (await engine.stats()).tiers.find(({ tier }) => tier === 'disk')!;
  expect(disk).toMatchObject({ inService: true, corrupt: 0n });
  expect(disk.evictions).toBeGreaterThan(0n);
  await rig.stop('SIGKILL');
  await engine.end();
  expect(await checkAfterwards(offered)).toBeGreaterThan(0);
});

it('killed at any moment, again and again over the same folder', async () => {
  for (const [life, afterMs] of [40, 90, 170, 260, 333].entries()) {
    await rig.start();
    const engine = await rig.attach();
    const timer = setTimeout(() => rig.child!.kill('SIGKILL'), afterMs);
    const offered = await workUntilDeath(engine, life);
    clearTimeout(timer);
    await rig.exit;
    await engine.end();
    await checkAfterwards(offered, life);
  }
});

it('killed while closing, and after a clean end everything that was committed is still there', async () => {
  await rig.start({ fault: 'store.close.before:kill' });
  const first = await rig.attach();
  await first.put('a', chainBlocks);
  await first.end();
  expect(await rig.stop()).toEqual({ code: null, signal: 'SIGKILL' });
  await checkAfterwards(new Map([['a', chainBlocks]]));

  await rig.start();
  const second = await rig.attach();
  await second.put('b', chainBlocks);
  await second.end();
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
  await rig.start();
  const third = await rig.attach();
  expect(await third.load('b', chainBlocks)).toEqual({
    loaded: chainBlocks,
    reason: '',
    tiers: Array(chainBlocks).fill('disk'),
  });
  expect((await third.load('b', chainBlocks)).tiers).toEqual(Array(chainBlocks).fill('arena'));
  await third.end();
});

/** Starts of a tier whose disks are mounted read-only, or not at all, each with a new life of everything: `mount` needs root. */
import { spawnSync } from 'node:child_process';
import { cpSync, mkdirSync, mkdtempSync, readdirSync, rmdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskTierOptions } from './options.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('mounts');
const chain: HashKey[] = Array.from({ length: 40 }, (_, i) => hashNamed(`m${i}`));
const patience = { timeout: 20_000, interval: 10 };

const canMount = ((): boolean => {
  const at = mkdtempSync(join(tmpdir(), 'kvtier-mount-'));
  const { status } = spawnSync('mount', ['-t', 'tmpfs', 'kvtier-test', at]);
  if (status === 0) spawnSync('umount', [at]);
  rmdirSync(at);
  return status === 0;
})();

let bench: TestBench;
let mounts: Set<string>;
let told: string[];
beforeEach((context) => {
  bench = new TestBench();
  mounts = new Set();
  told = [];
  if (canMount) return;
  console.warn('SKIPPED: disks that are read-only or not mounted at a start are not tested: mount needs root');
  context.skip();
});
afterEach(() => {
  for (const mount of mounts) spawnSync('umount', ['--lazy', mount]);
  bench.dispose();
});

const below = (name: string): string => join(bench.dir, name);
const run = (command: string, ...args: string[]): void => expect(spawnSync(command, args).status).toBe(0);

/** A file system of its own at each of these; they are there again, with what they hold, after `unmount` and `mount`. */
function mounted(...names: string[]): void {
  for (const name of names) {
    mkdirSync(below(name));
    mkdirSync(below(`${name}-device`));
    run('mount', '-t', 'tmpfs', '-o', 'size=16m', 'kvtier-test', below(`${name}-device`));
    mounts.add(below(`${name}-device`));
    mount(name);
  }
}
function mount(name: string): void {
  run('mount', '--bind', below(`${name}-device`), below(name));
  mounts.add(below(name));
}
function unmount(name: string): void {
  run('umount', below(name));
  mounts.delete(below(name));
}

function open(dirs: readonly string[], options: Partial<DiskTierOptions> = {}): Promise<DiskTier> {
  const log = {
    info: () => {},
    warn: () => {}, // each try in vain
    error: (fields: object, message: string) => void told.push(`${message}: ${JSON.stringify(fields)}`),
  };
  return DiskTier.open({
    ...{ dirs: dirs.map(below), capacityBytes: dirs.length * (4 << 20), segmentBytes: 256 << 10, log },
    ...{ arena: bench.arena, slots: bench.tier, retry: { firstMs: 20, longestMs: 100 } },
    ...{ mountsFile: below('disk-mounts.json'), ...options },
  });
}

/** A tier that holds the whole chain, some of it on each device, and is closed. */
async function filled(dirs: readonly string[]): Promise<void> {
  const tier = await open(dirs);
  for (let from = 0; from < chain.length; from += 10) {
    const part = chain.slice(from, from + 10);
    const statuses = await Promise.all(part.map((hash) => bench.write(tier, space, [hash], payloadBytes)));
    expect(statuses.flat()).toEqual(part.map(() => 'stored'));
  }
  expect(held(tier)).toBe(chain.length);
  await tier.close();
}
const held = (tier: DiskTier): number => chain.filter((hash) => tier.lookup(space, [hash]) === 1).length;
const isWhole = (tier: DiskTier): Promise<unknown> =>
  vi.waitUntil(() => tier.devices.every(({ inService }) => inService), patience);
const out = (tier: DiskTier): number | undefined => tier.stats().detail?.devices_out_of_service;

it('one of two that is mounted read-only begins out of service, and is back with its blocks when it can be written', async () => {
  mounted('a', 'b');
  await filled(['a/kvtier', 'b/kvtier']);
  run('mount', '-o', 'remount,ro,bind', below('b'));
  const tier = await open(['a/kvtier', 'b/kvtier']);
  expect(out(tier)).toBe(1);
  expect(tier.devices.map(({ inService }) => inService)).toEqual([true, false]);
  expect(tier.devices[1]!.reason).toMatch(/b\/kvtier\/lock: cannot be opened \(Read-only file system\)$/);
  expect(tier.stats()).toMatchObject({ inService: true });
  const before = held(tier);
  expect(before).toBeGreaterThan(0);
  expect(before).toBeLessThan(chain.length);
  run('mount', '-o', 'remount,rw,bind', below('b'));
  await isWhole(tier);
  expect(out(tier)).toBe(0);
  expect(held(tier)).toBe(chain.length);
  await tier.close();
});

it.each([
  ['a folder on it', 'a/kvtier', 'b/kvtier'],
  ['its mount point', 'a', 'b'],
])(
  'one of two that is not mounted is not written to below it, and is back when it is: %s',
  async (_, first, second) => {
    mounted('a', 'b');
    await filled([first, second]);
    unmount('b');
    const tier = await open([first, second]);
    expect(tier.devices.map(({ inService }) => inService)).toEqual([true, false]);
    const reason = `${below(second)}: is not mounted: before, it lay on what was mounted at ${below('b')}; mount that, or, to use the folder where it lies now, end the node and remove ${below('disk-mounts.json')}`;
    expect(tier.devices[1]!.reason).toBe(reason);
    expect(told.filter((line) => line.includes('is not mounted'))).toHaveLength(1);
    expect(held(tier)).toBeGreaterThan(0);
    expect(held(tier)).toBeLessThan(chain.length);
    expect(readdirSync(below('b'))).toEqual([]);
    mount('b');
    await isWhole(tier);
    expect(held(tier)).toBe(chain.length);
    await tier.close();
    unmount('b');
    expect(readdirSync(below('b'))).toEqual([]);
  },
);

it('the only one that is not mounted: no start, in one line; and a start when what is remembered is removed', async () => {
  mounted('a');
  await filled(['a/kvtier']);
  unmount('a');
  await expect(open(['a/kvtier'])).rejects.toMatchObject({
    code: 'IO',
    message: expect.stringMatching(/^\S+a\/kvtier: is not mounted: .*remove \S+\/disk-mounts\.json$/),
  });
  expect(readdirSync(below('a'))).toEqual([]);
  rmSync(below('disk-mounts.json'));
  const tier = await open(['a/kvtier']);
  expect(held(tier)).toBe(0);
  await tier.close();
});

it('what lies below a mount from before it was there is not taken for what was on it', async () => {
  mkdirSync(below('b'));
  await filled(['b/kvtier']);
  rmSync(below('b'), { recursive: true });
  mounted('b');
  await filled(['b/kvtier']);
  unmount('b');
  cpSync(below('b-device'), below('b'), { recursive: true });
  const lain = readdirSync(below('b/kvtier'));
  await expect(open(['b/kvtier'])).rejects.toThrow(/is not mounted/);
  expect(readdirSync(below('b/kvtier'))).toEqual(lain);
});

it('another disk in its place, an emptied folder, and another folder are taken as they are', async () => {
  mounted('a', 'c');
  await filled(['a/kvtier']);
  unmount('a');
  run('mount', '--bind', below('c-device'), below('a')); // a new disk
  await filled(['a/kvtier']);
  rmSync(below('a/kvtier'), { recursive: true });
  await filled(['a/kvtier']);
  run('umount', below('a'));
  mkdirSync(below('d'));
  await filled(['d/kvtier']); // not mounted, and never was
  const tier = await open(['d/kvtier']);
  expect(held(tier)).toBe(chain.length);
  await tier.close();
});

it('a folder whose file system is mounted above it by now, and that is in it as before, is taken', async () => {
  mounted('a');
  unmount('a');
  mkdirSync(below('a-device/inner'));
  mkdirSync(below('a/inner'));
  run('mount', '--bind', below('a-device/inner'), below('a/inner'));
  mounts.add(below('a/inner'));
  await filled(['a/inner']);
  run('umount', below('a/inner'));
  mounts.delete(below('a/inner'));
  mount('a');
  const tier = await open(['a/inner']);
  expect(held(tier)).toBe(chain.length);
  await tier.close();
});

/**
 * A file system that is full: no more files are made, and all else goes on in those that are there; with room again, more files.
 */
import { spawnSync } from 'node:child_process';
import {
  appendFileSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  truncateSync,
  writeFileSync,
} from 'node:fs';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
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
  if (mounted) expect(spawnSync('umount', ['--lazy', mount]).status).toBe(0);
  bench.dispose();
});

const segmentBytes = 1 << 20;
const imageBytes = 32 << 20;
/** What the file system in the image keeps of itself lies below. */
const metadataBytes = 36 << 16;
/** An object on the device, in whole pages. */
const objectBytes = 15 * 4096;

function open(dir: string, told: string[] = []): Promise<DiskTier> {
  const log = {
    info: () => {},
    warn: (_: object, message: string) => void told.push(message),
    error: (_: object, message: string) => void told.push(message),
  };
  return DiskTier.open({
    ...{ dir, capacityBytes: 16 << 20, segmentBytes, arena: bench.arena, slots: bench.tier, log },
    onOutOfService: (reason) => told.push(reason),
    retry: { firstMs: 50, longestMs: 50 },
  });
}
const segments = (dir: string): string[] => readdirSync(dir).filter((name) => /^segment-\d+\.kvs$/.test(name));

it('goes on with the files that it has, says so once, and makes more when there is room', async (context) => {
  if (!mounted) {
    console.warn('SKIPPED: the full disk is not tested: mount needs root');
    context.skip();
  }
  writeFileSync(join(mount, 'somebody-elses'), Buffer.alloc(2 << 20));
  const dir = join(mount, 'segments');
  const told: string[] = [];
  const tier = await open(dir, told);
  const rounds = Array.from({ length: 40 }, (_, round) =>
    Array.from({ length: 4 }, (_, i) => hashNamed(`${round}.${i}`)),
  );
  for (const hashes of rounds) {
    expect(await bench.write(tier, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'stored'));
    expect(await bench.read(tier, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'ready'));
  }
  expect(told.filter((message) => /no space left for more files/.test(message))).toHaveLength(1);
  expect(segments(dir).length).toBeLessThanOrEqual(3);
  const full = tier.stats();
  expect(full).toMatchObject({ inService: true, outOfServiceReason: '', corrupt: 0 });
  expect(full.detail).toMatchObject({ devices_without_space: 1, outages: 0 });
  expect(full.evictions).toBeGreaterThan(60);
  tier.checkIntegrity();
  // What is removed while it is full is gone for good, too.
  const latest = rounds.at(-1)!;
  expect(tier.remove(space, latest.slice(0, 2), 'asked')).toBe(2);
  await tier.close();
  const again = await open(dir, told);
  expect(await bench.read(again, space, latest, payloadBytes)).toEqual(['missing', 'missing', 'ready', 'ready']);
  await bench.write(again, space, rounds[0]!, payloadBytes);

  rmSync(join(mount, 'somebody-elses'));
  for (let i = 0; segments(dir).length < 4; i++) {
    expect(i).toBeLessThan(400);
    await bench.write(again, space, [hashNamed(`again ${i}`)], payloadBytes);
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
  await vi.waitUntil(() => again.stats().detail!.devices_without_space === 0, { timeout: 20_000 });
  again.checkIntegrity();
  await again.close();
});

it('does not start where not even one file fits', async (context) => {
  if (!mounted) context.skip();
  writeFileSync(join(mount, 'somebody-elses'), Buffer.alloc((6 << 20) - (1 << 19)));
  await expect(open(join(mount, 'segments'))).rejects.toThrow(/no space for 1048576 bytes \(No space left on device\)/);
});

it('comes back from an outage although the disk is full: what it holds can be read', async (context) => {
  if (!mounted) context.skip();
  const dir = join(mount, 'segments');
  const tier = await open(dir);
  const hashes = Array.from({ length: 40 }, (_, i) => hashNamed(i));
  for (let from = 0; from < 40; from += 8) await bench.write(tier, space, hashes.slice(from, from + 8), payloadBytes);
  const held = hashes.filter((hash) => tier.lookup(space, [hash]) === 1);
  fill(join(mount, 'somebody-elses'));
  const eio = 5;
  native.ioFault(tier.devices[0]!.io.handle, 1, eio, false);
  expect(await bench.read(tier, space, held.slice(-1), payloadBytes)).toEqual(['failed']);
  expect(tier.stats().inService).toBe(false);
  native.ioFault(tier.devices[0]!.io.handle, 0, 0, false);
  await vi.waitUntil(() => tier.stats().inService, { timeout: 20_000 });
  expect(await bench.read(tier, space, held.slice(0, -1), payloadBytes)).toEqual(held.slice(0, -1).map(() => 'ready'));
  await tier.close();
});

it('on a thin volume that is full: what is held is read on, and writes go on where there is space', async (context) => {
  const volume = mounted ? ThinVolume.mount(mount) : undefined;
  if (volume === undefined) {
    console.warn('SKIPPED: the thin volume is not tested: loop devices need root');
    context.skip();
    return;
  }
  try {
    const dir = join(volume.dir, 'segments');
    const told: string[] = [];
    const tier = await open(dir, told);
    const before = Array.from({ length: 24 }, (_, i) => hashNamed(i));
    for (let from = 0; from < 24; from += 8) await bench.write(tier, space, before.slice(from, from + 8), payloadBytes);
    // The next segment is made; what is zeros takes no space on the volume any more, and somebody takes nearly all of it.
    await vi.waitUntil(() => segments(dir).length === 3, { timeout: 20_000 });
    volume.giveBackZeros();
    fill(join(mount, 'somebody-elses'));
    truncateSync(join(mount, 'somebody-elses'), statSync(join(mount, 'somebody-elses')).size - 5 * objectBytes);
    const during = Array.from({ length: 16 }, (_, i) => hashNamed(`during ${i}`));
    const stored: HashKey[] = [];
    // One by one: a loop device calls a merged write that its file took in part a success.
    for (const hash of during)
      if ((await bench.write(tier, space, [hash], payloadBytes))[0] === 'stored') stored.push(hash);
    expect(stored).toEqual(during.slice(0, 5));
    const all = [...before, ...stored];
    expect(await bench.read(tier, space, all, payloadBytes)).toEqual(all.map(() => 'ready'));
    expect(tier.stats()).toMatchObject({ inService: true, outOfServiceReason: '', corrupt: 0 });
    expect(told.filter((message) => /no space left even for writes/.test(message))).toHaveLength(1);

    rmSync(join(mount, 'somebody-elses'));
    let [after, tries] = [hashNamed('after'), 0];
    await vi.waitUntil(
      async () => {
        after = hashNamed(`after ${tries++}`);
        return (await bench.write(tier, space, [after], payloadBytes))[0] === 'stored';
      },
      { timeout: 20_000 },
    );
    expect(told.filter((message) => /has space for writes again/.test(message))).toHaveLength(1);
    tier.checkIntegrity();
    await tier.close();
    const again = await open(dir, told);
    all.push(after);
    expect(await bench.read(again, space, all, payloadBytes)).toEqual(all.map(() => 'ready'));
    await again.close();
  } finally {
    volume.unmount();
  }
});

/** A file system in a sparse file on the small one: it promises more than there is, as thin volumes do. */
class ThinVolume {
  readonly dir: string;
  readonly #image: string;

  static mount(where: string): ThinVolume | undefined {
    const image = join(where, 'image');
    const dir = join(where, 'thin');
    writeFileSync(image, '');
    truncateSync(image, imageBytes);
    mkdirSync(dir);
    const made = spawnSync('mkfs.ext4', ['-q', '-b', '4096', '-E', 'lazy_itable_init=0', '-O', '^has_journal', image]);
    const isMounted = made.status === 0 && spawnSync('mount', ['-o', 'loop', image, dir]).status === 0;
    return isMounted ? new ThinVolume(dir, image) : undefined;
  }

  private constructor(dir: string, image: string) {
    this.dir = dir;
    this.#image = image;
  }

  /** Nothing is written meanwhile. */
  giveBackZeros(): void {
    expect(spawnSync('sync', ['-f', this.dir]).status).toBe(0);
    const bytes = readFileSync(this.#image);
    const zeros = Buffer.alloc(4096);
    const isZero = (at: number): boolean => bytes.subarray(at, at + zeros.length).equals(zeros);
    for (let at = metadataBytes; at < bytes.length; at += zeros.length) {
      const from = at;
      while (at < bytes.length && isZero(at)) at += zeros.length;
      if (at === from) continue;
      const range = ['-o', `${from}`, '-l', `${at - from}`];
      expect(spawnSync('fallocate', ['--punch-hole', ...range, this.#image]).status).toBe(0);
    }
  }

  /** Also where a failed test left files open. */
  unmount(): void {
    expect(spawnSync('umount', ['--lazy', this.dir]).status).toBe(0);
  }
}

/** Bytes until there is no room for one more page. */
function fill(path: string): void {
  for (const bytes of [1 << 20, 1 << 16, 4096]) {
    try {
      for (;;) appendFileSync(path, Buffer.alloc(bytes, 1));
    } catch (error) {
      expect((error as NodeJS.ErrnoException).code).toBe('ENOSPC');
    }
  }
}

/**
 * A folder that a newer program wrote, after a way back to this one: what this one cannot read is left for who can. Whole segments of
 * another version take their device out of service; objects of another version, codec or flags are misses.
 */
import { mkdirSync, readdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { newerHeaders, resealed } from '../kit/testing/newer.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DeviceFiles } from './device-files.ts';
import { DiskIndex } from './disk-index.ts';
import { DiskTier } from './disk-tier.ts';
import { encodeSegmentHeader, pageBytes } from './format.ts';
import type { DiskTierOptions } from './options.ts';
import { checkpointName, recoverContents, segmentName } from './recovery.ts';

const payloadBytes = 12_000;
const space = namespaceNamed('newer');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(`block${i}`));
const ready = chain.map(() => 'ready');
const patience = { timeout: 20_000, interval: 10 };

let bench: TestBench;
let dir: string;
beforeEach(() => {
  bench = new TestBench();
  dir = join(bench.dir, 'a');
});
afterEach(() => {
  vi.restoreAllMocks();
  bench.dispose();
});

const open = (options: Partial<DiskTierOptions> = {}): Promise<DiskTier> =>
  DiskTier.open({
    ...{ dir, capacityBytes: 4 << 20, arena: bench.arena, slots: bench.tier, log: silentLog },
    ...{ retry: { firstMs: 20, longestMs: 100 }, io: { backend: 'threads' } },
    ...options,
  });

/** Blocks that an earlier life left. */
async function written(): Promise<void> {
  const tier = await open();
  expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
  await tier.close();
}

const segmentsIn = (folder: string): string[] => readdirSync(folder).filter((name) => /^segment-\d+\.kvs$/.test(name));
/** The segments of a folder, byte for byte. */
const contentsOf = (folder: string): Map<string, string> =>
  new Map(segmentsIn(folder).map((name) => [name, readFileSync(join(folder, name), 'latin1')]));

/** The first page of a segment as of another version. */
function renewSegment(path: string): void {
  const bytes = readFileSync(path);
  bytes.writeUInt32LE(2, 8);
  bytes.writeBigUInt64LE(native.xxh3_64(bytes.subarray(0, pageBytes - 8)), pageBytes - 8);
  writeFileSync(path, bytes);
}

/** Where the object of this name lies. */
function placeOf(hash: HashKey): { path: string; at: number } {
  const name = Buffer.from(hash, 'latin1');
  for (const file of segmentsIn(dir)) {
    const path = join(dir, file);
    const bytes = readFileSync(path);
    for (let at = pageBytes; at < bytes.length; at += pageBytes)
      if (bytes.toString('latin1', at, at + 8) === 'KVTIEROB' && bytes.subarray(at + 48, at + 80).equals(name))
        return { path, at };
  }
  throw new Error('no segment has that block');
}

function renewObject(hash: HashKey, change: (header: Buffer) => void): { path: string; at: number } {
  const { path, at } = placeOf(hash);
  const bytes = readFileSync(path);
  resealed(bytes.subarray(at, at + headerBytes), change);
  writeFileSync(path, bytes);
  return { path, at };
}

const objectAt = ({ path, at }: { path: string; at: number }): Buffer =>
  readFileSync(path).subarray(at, at + headerBytes + payloadBytes);

describe('a segment of another version', () => {
  const line = /segment-\d{8}\.kvs: .* version 2.*(update back|folder)/;

  it('takes its device out of service, in one line, and no file is touched', async () => {
    await written();
    const [first, ...others] = segmentsIn(dir);
    expect(first).toBeDefined();
    renewSegment(join(dir, first!));
    // What would go at a start: leftovers, and what is damaged.
    writeFileSync(join(dir, `${segmentName(77)}.new`), 'x');
    if (others[0] !== undefined) writeFileSync(join(dir, others[0]), 'damaged');
    const [before, names] = [contentsOf(dir), readdirSync(dir)];
    const tier = await open();
    expect(tier.stats()).toMatchObject({ inService: false, blocks: 0, detail: { devices_out_of_service: 1 } });
    expect(tier.stats().outOfServiceReason).toMatch(line);
    expect(tier.stats().outOfServiceReason).not.toContain('\n');
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'missing'));
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'refused'));
    tier.checkIntegrity();
    await tier.close();
    expect(contentsOf(dir)).toEqual(before);
    expect(readdirSync(dir).sort()).toEqual(names.sort());
  });

  it('costs the other devices nothing', async () => {
    await written();
    renewSegment(join(dir, segmentsIn(dir)[0]!));
    const tier = await open({ dirs: [dir, join(bench.dir, 'b')], capacityBytes: 8 << 20 });
    expect(tier.stats()).toMatchObject({ inService: true, detail: { devices: 2, devices_out_of_service: 1 } });
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
    await tier.close();
  });

  it('is tried again: the device is back, without a restart, when they are gone', async () => {
    await written();
    for (const name of segmentsIn(dir)) renewSegment(join(dir, name));
    const tier = await open();
    expect(tier.stats().inService).toBe(false);
    const away = join(bench.dir, 'away');
    mkdirSync(away);
    for (const name of segmentsIn(dir)) renameSync(join(dir, name), join(away, name));
    await vi.waitUntil(() => tier.stats().inService, patience);
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
    await tier.close();
  });

  it('with a wrong checksum is damage, as ever', async () => {
    await written();
    const path = join(dir, segmentsIn(dir)[0]!);
    const bytes = readFileSync(path);
    bytes.writeUInt32LE(2, 8);
    writeFileSync(path, bytes);
    const tier = await open();
    expect(tier.stats().inService).toBe(true);
    await tier.close();
  });
});

describe.each(newerHeaders)('an object with %s', (_, change) => {
  it('is a miss, counted apart, and its bytes stay', async () => {
    await written();
    const strange = chain[3]!;
    const place = renewObject(strange, change);
    const before = objectAt(place);
    const tier = await open();
    expect(tier.lookup(space, chain)).toBe(8);
    const statuses = chain.map((hash) => (hash === strange ? 'missing' : 'ready'));
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(statuses);
    expect(tier.stats()).toMatchObject({ inService: true, corrupt: 0, blocks: 7, detail: { foreign_blocks: 1 } });
    expect(tier.lookup(space, [strange])).toBe(0);
    // Its name is free: the block is stored anew, elsewhere.
    expect(await bench.write(tier, space, [strange], payloadBytes)).toEqual(['stored']);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
    tier.checkIntegrity();
    await tier.close();
    expect(objectAt(place).equals(before)).toBe(true);
  });

  it('in a segment that is walked over: nothing is written over it, nor behind it', async () => {
    await written();
    const place = renewObject(chain[3]!, change);
    // As a kill leaves it: the footer of the open segment was not written.
    const bytes = readFileSync(place.path);
    bytes.fill(0, bytes.length - pageBytes);
    writeFileSync(place.path, bytes);
    const last = placeOf(chain[7]!);
    const before = [objectAt(place), objectAt(last)];
    const tier = await open();
    expect(tier.lookup(space, chain.slice(0, 3))).toBe(3);
    expect(await bench.read(tier, space, chain.slice(0, 3), payloadBytes)).toEqual(ready.slice(0, 3));
    const fresh = Array.from({ length: 12 }, (_, i) => hashNamed(`fresh ${i}`));
    expect(await bench.write(tier, space, fresh, payloadBytes)).toEqual(fresh.map(() => 'stored'));
    await tier.close();
    expect([objectAt(place), objectAt(last)].map((now, i) => now.equals(before[i]!))).toEqual([true, true]);
  });
});

describe('an object of another version, from a former life of its segment', () => {
  /** As `placeOf` found it, with another version and generation, at this place. */
  function leaveBehind({ path, at }: { path: string; at: number }, place: { path: string; at: number }): void {
    const header = Buffer.from(readFileSync(path).subarray(at, at + headerBytes));
    resealed(header, (bytes) => {
      bytes.writeUInt16LE(2, 8);
      bytes.writeBigUInt64LE(bytes.readBigUInt64LE(128) + 1000n, 128);
    });
    const bytes = readFileSync(place.path);
    header.copy(bytes, place.at);
    writeFileSync(place.path, bytes);
  }

  it('is not in the way of what is written: the open segment goes on just there', async () => {
    await written();
    const last = placeOf(chain[7]!);
    const end = { ...last, at: last.at + pageBytes * Math.ceil((headerBytes + payloadBytes) / pageBytes) };
    leaveBehind(last, end);
    const tier = await open();
    expect(tier.lookup(space, chain)).toBe(8);
    const fresh = hashNamed('fresh');
    expect(await bench.write(tier, space, [fresh], payloadBytes)).toEqual(['stored']);
    await tier.close();
    expect(placeOf(fresh)).toEqual(end);
  });

  it('leaves its segment empty: whole restarts cost no room', async () => {
    await written();
    const last = placeOf(chain[7]!);
    // Ready for use: with a generation, and without an object of it.
    const id = 77;
    const bytes = readFileSync(last.path).length;
    const path = join(dir, segmentName(id));
    const page = encodeSegmentHeader({ id, bytes, generation: 50 });
    writeFileSync(path, Buffer.concat([page, Buffer.alloc(bytes - page.length)]));
    leaveBehind(last, { path, at: pageBytes });
    const files = new DeviceFiles(dir, 10_000, () => performance.now());
    const found = await recoverContents(dir, files, { id, bytes, generation: 50 }, () => {
      throw new Error('it holds nothing');
    });
    files.close();
    expect(found).toEqual({ sealed: false, hasFooter: false, tail: pageBytes });
  });
});

describe('an object with an unknown codec, stored anew on another device', () => {
  const [, codec] = newerHeaders[1]!;
  const strange = chain[3]!;
  const other = (): string => join(bench.dir, 'b');

  /** The blocks of a newer program on one device, and `strange`, made anew, on another, later. */
  async function both(): Promise<void> {
    await written();
    renewObject(strange, codec);
    const tier = await open({ dir: other() });
    expect(await bench.write(tier, space, [strange], payloadBytes)).toEqual(['stored']);
    for (let i = 0; i < 100; i++) tier.touch(space, [strange]); // later than all of the others
    await tier.close();
  }

  /** Recovery of this device waits for the other one's. */
  function listLast(dirs: readonly string[], last: number): void {
    let listed = (): void => {};
    const isListed = new Promise<void>((resolve) => (listed = resolve));
    const read = native.fileRead;
    vi.spyOn(native, 'fileRead').mockImplementation(async (files, path, position, bytes) => {
      if (path.startsWith(`${dirs[last]!}/segment`)) await isListed;
      return read.apply(native, [files, path, position, bytes]);
    });
    const restore = DiskIndex.prototype.restore;
    vi.spyOn(DiskIndex.prototype, 'restore').mockImplementation(function (this: DiskIndex, ...args) {
      if (args[2].device !== last) listed();
      return restore.apply(this, args);
    });
  }

  it.each([0, 1])('is read from there, and what is there stays, whichever is listed last: device %i', async (last) => {
    await both();
    const dirs = [dir, other()];
    listLast(dirs, last);
    for (let start = 0; start < 2; start++) {
      const tier = await open({ dirs, capacityBytes: 8 << 20 });
      expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
      expect(tier.stats()).toMatchObject({ blocks: 8, corrupt: 0, detail: { foreign_blocks: 0 } });
      tier.checkIntegrity();
      await tier.close();
    }
  });

  it('and one that a walk meets is stepped over: nothing is known of its age', async () => {
    await both();
    for (const folder of [dir, other()])
      for (const name of segmentsIn(folder)) {
        const bytes = readFileSync(join(folder, name));
        bytes.fill(0, bytes.length - pageBytes);
        writeFileSync(join(folder, name), bytes);
      }
    rmSync(join(dir, checkpointName), { force: true });
    const dirs = [dir, other()];
    listLast(dirs, 0);
    const tier = await open({ dirs, capacityBytes: 8 << 20 });
    expect(tier.stats().blocks).toBe(8);
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
    await tier.close();
    const alone = await open();
    expect(alone.lookup(space, [strange])).toBe(0);
    expect(alone.stats().blocks).toBe(7);
    await alone.close();
  });
});

/** How recency comes to the disk: in parts, none of them long, and not more of it than a device has time for. */
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import type { HashKey } from '@kvtier/identity';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { namespaceNamed } from '../kit/testing/objects.ts';
import { checkpointEveryMs, writeCheckpoint } from './checkpoint.ts';
import { DeviceFiles } from './device-files.ts';
import { DiskIndex } from './disk-index.ts';
import { decodeCheckpoint, encodeCheckpoint } from './format.ts';
import { Segment } from './segment.ts';

const mebibyte = 1 << 20;
const space = namespaceNamed('checkpoint');
const nameOf = (number: number): HashKey =>
  Buffer.from(Float64Array.of(number, number * 7, number * 13, number * 17).buffer).toString('latin1') as HashKey;

let dir: string;
let files: DeviceFiles;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-checkpoint-'));
  files = new DeviceFiles(dir, 10_000, () => performance.now());
});
afterEach(() => {
  vi.restoreAllMocks();
  files.close();
  rmSync(dir, { recursive: true });
});

/** Segments of so many blocks, of which every third was used. */
function filled(segmentCount: number, blocks: number) {
  const index = new DiskIndex();
  const segments = Array.from({ length: segmentCount }, (_, at) => {
    const segment = new Segment(at + 1, `segment ${at + 1}`, 256 * mebibyte, 0, at);
    segment.generation = at + 10;
    index.register(segment);
    for (let block = 0; block < blocks; block++) {
      const entry = index.add(space, nameOf(at * blocks + block), segment, block + 1, 1);
      if (block % 3 === 0) index.touch(entry);
    }
    return segment;
  });
  const parts = { dir, files, index, metadataBytes: 64 * mebibyte, step: () => {} };
  const pool = {
    *coldestFirst() {
      yield* segments;
    },
  };
  return { index, segments, write: () => writeCheckpoint(pool as Parameters<typeof writeCheckpoint>[0], parts) };
}

it('of many blocks it is written in parts of a mebibyte, and is what it is in one piece', async () => {
  const { index, segments, write } = filled(5, 65_000);
  const make = vi.spyOn(native, 'fileMake');
  const more = vi.spyOn(native, 'fileWrite');
  const written = await write();
  const handed = [
    ...make.mock.calls.map(([, , bytes]) => bytes.length),
    ...more.mock.calls.map(([, , , bytes]) => bytes.length),
  ];
  const bytes = readFileSync(join(dir, 'checkpoint.kvc'));
  expect(handed).toEqual([mebibyte, mebibyte, bytes.length - 2 * mebibyte]);
  expect(written).toEqual({ tick: index.tick, bytes: bytes.length });
  const decoded = decodeCheckpoint(bytes)!;
  expect(decoded.tick).toBe(index.tick);
  expect(decoded.segments.map(({ id, generation, rank }) => [id, generation, rank])).toEqual(
    segments.map(({ id, generation }, rank) => [id, generation, rank]),
  );
  for (const [at, segment] of segments.entries()) {
    const ages = [...index.listedOf(segment)].flatMap((entry) => [
      index.table.page(entry),
      2 * (index.tick - index.table.lastUse(entry)) + (index.table.isHot(entry) ? 1 : 0),
    ]);
    expect(decoded.segments[at]!.uses).toEqual(Uint32Array.from(ages));
  }
  expect(encodeCheckpoint(decoded).equals(bytes)).toBe(true);
  expect(readdirSync(dir)).toEqual(['checkpoint.kvc']);
});

it('what could not be written to its end takes no space, and the former one stays', async () => {
  const { write } = filled(5, 65_000);
  await write();
  const before = readFileSync(join(dir, 'checkpoint.kvc'));
  vi.spyOn(native, 'fileWrite').mockRejectedValueOnce(new Error('no space'));
  await expect(write()).rejects.toThrow('no space');
  expect(existsSync(join(dir, 'checkpoint.kvc.new'))).toBe(false);
  expect(readFileSync(join(dir, 'checkpoint.kvc')).equals(before)).toBe(true);
});

it.each([
  { blocks: 0, everyMs: 30_000 },
  { blocks: 900_000, everyMs: 30_000 },
  { blocks: 10_000_000, everyMs: 312_500 },
])('of $blocks blocks it is written every $everyMs ms', ({ blocks, everyMs }) => {
  expect(checkpointEveryMs(30_000, 8 * blocks)).toBe(everyMs);
});

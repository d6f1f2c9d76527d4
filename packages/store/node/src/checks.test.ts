/** What is looked at of a node's disk before a start. The rest, by its program: test/e2e/check.test.ts. */
import { mkdtempSync, readdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { cacheNodeSchema, parseConfig } from '@kvtier/config';
import { afterAll, expect, it } from 'vitest';
import { cacheNodeChecks } from './checks.ts';

const dir = mkdtempSync(join(tmpdir(), 'kvtier-node-checks-'));
afterAll(() => rmSync(dir, { recursive: true }));

async function problems(disk: object, dataDir = join(dir, 'data')): Promise<unknown[]> {
  const least = { socketPath: join(dir, 'node.sock'), dataDir, arena: { bytes: 2 ** 20 } };
  const found: unknown[] = [];
  for (const look of cacheNodeChecks(parseConfig(cacheNodeSchema, { ...least, disk }, 'test'))) {
    try {
      await look();
    } catch (error) {
      found.push(error);
    }
  }
  expect(readdirSync(dir)).toEqual([]);
  return found;
}

const MiB = 2 ** 20;
it.each<[string, object]>([
  ['all of it', { bytes: 8 * MiB, segmentBytes: 8 * MiB }],
  ['the own bytes of a folder', { bytes: 64 * MiB, dirs: [{ dir, bytes: 8 * MiB }], segmentBytes: 8 * MiB }],
  [
    'what others leave a folder',
    { bytes: 72 * MiB, dirs: [{ dir: join(dir, 'a'), bytes: 64 * MiB }, dir], segmentBytes: 8 * MiB },
  ],
])('a disk without room for two segments is refused for good: %s', async (_, disk) => {
  const line =
    /^disk: 8388608 bytes hold no two segments of 8388608 \(.*raise the disk tier's bytes or lower segmentBytes$/;
  expect(await problems(disk)).toEqual([
    expect.objectContaining({ code: 'CONFIG', isFinal: true, message: expect.stringMatching(line) }),
  ]);
});

it('and one with it is not', async () => {
  expect(await problems({ bytes: 64 * MiB, dirs: [dir, { dir: join(dir, 'a'), bytes: 32 * MiB }] })).toEqual([]);
});

it('a disk that is not mounted is found: no folder to make its own in, or one that lies elsewhere than before', async () => {
  const folder = join(dir, 'a', 'kvtier');
  const least = { bytes: 64 * MiB, segmentBytes: 8 * MiB };
  const message = `disk.dirs.1: ${folder} cannot be made: there is no folder ${join(dir, 'a')}; mount its disk, or make that folder`;
  // On a volume of its own (a /tmp that is one) all of it can be made.
  const isOnRoot = statSync(dir).dev === statSync('/').dev;
  expect(await problems({ ...least, dirs: [dir, folder] })).toEqual(
    isOnRoot ? [expect.objectContaining({ code: 'SETUP', message })] : [],
  );
  const data = mkdtempSync(join(tmpdir(), 'kvtier-node-checks-data-'));
  const file = join(data, 'disk-mounts.json');
  writeFileSync(file, JSON.stringify({ [dir]: { mount: dir, lock: '1' } }));
  expect(await problems({ ...least, dirs: [dir] }, data)).toEqual([
    expect.objectContaining({
      code: 'IO',
      message: `${dir}: is not mounted: before, it lay on what was mounted at ${dir}; mount that, or, to use the folder where it lies now, end the node and remove ${file}`,
    }),
  ]);
  rmSync(data, { recursive: true });
});

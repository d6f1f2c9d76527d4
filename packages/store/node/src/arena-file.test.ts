/** What a start that fails, and a stranger who cleans up, leave of an arena's files. */
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { createArenaFile } from './arena-file.ts';

let folders: string[];
const create = (group?: number) => createArenaFile(folders[0]!, folders[1]!, 1 << 20, group);

beforeEach(() => {
  folders = ['/dev/shm/kvtier-test-', join(tmpdir(), 'kvtier-')].map((name) => mkdtempSync(name));
});
afterEach(() => {
  vi.restoreAllMocks();
  for (const folder of folders) rmSync(folder, { recursive: true });
});

it('a start that cannot give the files to its group leaves none, and nothing mapped', () => {
  const close = vi.spyOn(native, 'arenaClose');
  expect(() => create(2 ** 33)).toThrow(expect.objectContaining({ code: 'SETUP' }));
  expect(readdirSync(folders[0]!)).toEqual([]);
  expect(close).toHaveBeenCalledOnce();
});

it('a start whose lock file has no place leaves no arena', () => {
  const { arenaCreate } = native;
  vi.spyOn(native, 'arenaCreate').mockImplementation((path, ...rest) => {
    writeFileSync(`${path}.lock`, 'of somebody else');
    return arenaCreate(path, ...rest);
  });
  expect(() => create()).toThrow(/EEXIST/);
  expect(readdirSync(folders[0]!)).toEqual([expect.stringMatching(/\.lock$/)]);
});

it('a start that finds no room names the arenas that no node holds', () => {
  const dead = join(folders[0]!, 'kvtier-0123abcd-89ef4567');
  writeFileSync(dead, Buffer.alloc(8192));
  expect(() => createArenaFile(folders[0]!, folders[1]!, 2 ** 46)).toThrow(
    expect.objectContaining({
      code: 'CAPACITY',
      message: expect.stringMatching(
        new RegExp(`make the arena smaller; 8192 bytes there are arenas that no node holds: remove ${dead}\\*$`),
      ),
    }),
  );
  expect(readdirSync(folders[0]!)).toEqual(['kvtier-0123abcd-89ef4567']);
});

it('knows whether its path still leads to it, and closes all the same', () => {
  const file = create();
  expect(file.isThere()).toBe(true);
  rmSync(file.path);
  expect(file.isThere()).toBe(false);
  writeFileSync(file.path, '');
  expect(file.isThere()).toBe(false);
  for (const name of readdirSync(folders[0]!)) rmSync(join(folders[0]!, name));
  file.close();
  expect(readdirSync(folders[0]!)).toEqual([]);
});

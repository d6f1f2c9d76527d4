import {
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readlinkSync,
  renameSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { native } from './index.ts';
import { arenaPrefix, lockFileOf, ownArenaBytes, placeId, removeStaleArenas, unheldArenas } from './places.ts';

let folder: string;
let shm: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-places-'));
  shm = join(folder, 'shm');
  for (const name of ['shm', 'mine', 'other']) mkdirSync(join(folder, name));
});
afterEach(() => rmSync(folder, { recursive: true }));
const at = (name: string): string => join(folder, name);

it('a folder keeps its id where it is moved, and a copy gets one of its own', () => {
  const id = placeId(at('mine'));
  expect(id).toMatch(/^[0-9a-f]{8}$/);
  expect(placeId(at('mine'))).toBe(id);
  expect(placeId(at('other'))).not.toBe(id);
  renameSync(at('mine'), at('moved'));
  expect(placeId(at('moved'))).toBe(id);
  cpSync(at('moved'), at('mine'), { recursive: true, verbatimSymlinks: true });
  expect(readlinkSync(join(at('mine'), 'place.id'))).toContain(id);
  expect(placeId(at('mine'))).not.toBe(id);
  expect(placeId(at('moved'))).toBe(id);
  expect(readdirSync(at('moved'))).toEqual(['place.id']);
});

it.each([
  ['a link to something else', (path: string) => symlinkSync('/etc/passwd', path)],
  ['a link that leads out of the folder', (path: string) => symlinkSync('1-../../../x', path)],
  ['a file', (path: string) => writeFileSync(path, 'x')],
])('%s in its place is replaced', (_, make) => {
  make(join(at('mine'), 'place.id'));
  const id = placeId(at('mine'));
  expect(id).toMatch(/^[0-9a-f]{8}$/);
  expect(placeId(at('mine'))).toBe(id);
});

it('removes the arenas of this folder only, and none that somebody holds', () => {
  const arena = (dir: string, life: string): string => join(shm, `${arenaPrefix(at(dir))}${life}`);
  writeFileSync(arena('mine', 'dead'), 'x');
  writeFileSync(arena('other', 'dead'), 'x');
  const live = native.arenaCreate(arena('mine', 'live'), 1 << 16, 1);
  expect(removeStaleArenas(at('mine'), shm)).toBe(1);
  expect(readdirSync(shm).toSorted()).toEqual(
    [`${arenaPrefix(at('mine'))}live`, `${arenaPrefix(at('other'))}dead`].toSorted(),
  );
  native.arenaClose(live);
  expect(removeStaleArenas(at('mine'), shm)).toBe(1);
  expect(removeStaleArenas(at('mine'), join(folder, 'nowhere'))).toBe(0);
});

it('names the arenas that no node holds, and none that goes by itself or is held', () => {
  const arena = (dir: string, life: string): string => join(shm, `${arenaPrefix(at(dir))}${life}`);
  const dead = arena('other', '00000001');
  writeFileSync(dead, Buffer.alloc(8192));
  writeFileSync(lockFileOf(dead), Buffer.alloc(4096));
  writeFileSync(arena('mine', '00000002'), Buffer.alloc(8192));
  writeFileSync(join(shm, 'kvtier-of-others'), 'x');
  symlinkSync(dead, arena('other', '00000003'));
  const live = native.arenaCreate(arena('other', '00000004'), 1 << 16, 1);
  expect(unheldArenas(at('mine'), shm)).toBe(`; 12288 bytes there are arenas that no node holds: remove ${dead}*`);
  expect(ownArenaBytes(at('mine'), shm)).toBe(8192);
  native.arenaClose(live);
  for (let life = 5; life < 10; life++) writeFileSync(arena('other', `0000000${life}`), 'x');
  expect(unheldArenas(at('mine'), shm)).toMatch(/: remove (\S+\* ){4}and 3 more$/);
  for (const name of readdirSync(shm)) rmSync(join(shm, name));
  expect(unheldArenas(at('mine'), shm)).toBe('');
  expect(unheldArenas(at('nowhere'), join(folder, 'nowhere'))).toBe('');
});

it('unlinkUnlocked: nothing is there, a link is not followed', () => {
  expect(native.unlinkUnlocked(join(shm, 'none'))).toBe(false);
  writeFileSync(join(shm, 'file'), 'x');
  symlinkSync(join(shm, 'file'), join(shm, 'link'));
  expect(() => native.unlinkUnlocked(join(shm, 'link'))).toThrow(/^IO: .*link: cannot be opened/);
  expect(readdirSync(shm)).toEqual(['file', 'link']);
});

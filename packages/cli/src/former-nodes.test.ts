import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { placeId } from '@kvtier/data-plane/places';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { FormerNodes, formerNodes } from './former-nodes.ts';
import { parseUp } from './options.ts';
import { startSystem } from './system.ts';

let dataDir: string;
beforeEach(() => {
  dataDir = mkdtempSync(join(tmpdir(), 'kvtier-former-'));
});
afterEach(() => rmSync(dataDir, { recursive: true, force: true }));

/** As a cache node leaves it. */
function nodeIn(name: string): void {
  mkdirSync(join(dataDir, name, 'segments'), { recursive: true });
  writeFileSync(join(dataDir, name, 'segments', 'bytes'), 'x');
  writeFileSync(join(dataDir, name, 'node.lock'), '');
}

it('are those beyond the number that there is, of cache nodes alone', () => {
  for (const name of ['node-0', 'node-1', 'node-2', 'node-11', 'node-x']) nodeIn(name);
  mkdirSync(join(dataDir, 'node-3'));
  writeFileSync(join(dataDir, 'node-3', 'thesis'), 'x');
  const names = (nodes: number): string[] => formerNodes(dataDir, nodes).map((dir) => dir.slice(dataDir.length + 1));
  expect(names(2).toSorted()).toEqual(['node-11', 'node-2']);
  expect(names(1).toSorted()).toEqual(['node-1', 'node-11', 'node-2']);
});

/** What a start with one node does, and what it tells. */
function removed(): string[] {
  const told: string[] = [];
  const tell = (message: string): void => {
    told.push(message.replaceAll(`${dataDir}/`, ''));
  };
  new FormerNodes(dataDir, 1, tell).remove(dataDir);
  return told;
}
const gone = 'there is no such node any more; removed what it had stored';

it('go with what they stored and their arenas; what others put there stays', () => {
  for (const name of ['node-1', 'node-2']) nodeIn(name);
  writeFileSync(join(dataDir, 'node-2', 'thesis'), 'x');
  writeFileSync(join(dataDir, `kvtier-${placeId(join(dataDir, 'node-1'))}-arena`), 'x');
  expect(removed()).toEqual([`node-1: ${gone}`, `node-2: ${gone}`]);
  expect(readdirSync(dataDir)).toEqual(['node-2']);
  expect(readdirSync(join(dataDir, 'node-2'))).toEqual(['thesis']);
  expect(formerNodes(dataDir, 1)).toEqual([]);
});

it('that lie elsewhere by a link are emptied', () => {
  nodeIn('elsewhere');
  symlinkSync(join(dataDir, 'elsewhere'), join(dataDir, 'node-1'));
  expect(removed()).toEqual([`node-1: ${gone}`]);
  expect(readdirSync(dataDir)).toEqual(['elsewhere', 'node-1']);
  expect(readdirSync(join(dataDir, 'elsewhere'))).toEqual([]);
});

it('that cannot be removed are told, and the others go all the same', () => {
  for (const name of ['node-1', 'node-2', 'node-3']) nodeIn(name);
  mkdirSync(join(dataDir, 'node-1', 'place.id'));
  rmSync(join(dataDir, 'node-2', 'node.lock'));
  mkdirSync(join(dataDir, 'node-2', 'node.lock'));
  expect(removed()).toEqual([
    expect.stringMatching(/^node-2: no node of this start, and what lies there stays: .*node.lock/),
    expect.stringMatching(/^node-1: there is no such node any more; what it stored cannot be removed \(.*place.id/),
    `node-3: ${gone}`,
  ]);
  expect(readdirSync(dataDir)).toEqual(['node-1', 'node-2']);
});

it('that another process uses stay, and are locked from the count of their bytes to their end', () => {
  for (const name of ['node-1', 'node-2']) nodeIn(name);
  const lock = native.lockFile(join(dataDir, 'node-1', 'node.lock'));
  const told: string[] = [];
  const former = new FormerNodes(dataDir, 1, (message) => told.push(message));
  expect(former.dirs).toEqual([join(dataDir, 'node-2')]);
  expect(told).toEqual([expect.stringContaining('node-1: no node of this start, and what lies there stays: ')]);
  const take = (): void => native.unlock(native.lockFile(join(dataDir, 'node-2', 'node.lock')));
  expect(take).toThrow('LOCKED');
  former.release();
  take();
  former.remove(dataDir);
  expect(readdirSync(dataDir)).toEqual(['node-1', 'node-2']);
  native.unlock(lock);
});

it('stay where the start is refused', async () => {
  nodeIn('node-1');
  const flags = ['--port', '0', '--data-dir', dataDir, '--engines', '64', '--kv-bytes', '1MiB'];
  for (const more of [['--no-tier'], ['--nodes', '1']])
    await expect(startSystem(parseUp([...flags, ...more])!, { onLine: () => {}, onEvent: () => {} })).rejects.toThrow(
      '--kv-bytes: 1 MiB are too little for 64 engines',
    );
  expect(existsSync(join(dataDir, 'node-1', 'segments', 'bytes'))).toBe(true);
});

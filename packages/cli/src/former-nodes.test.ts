import { existsSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { formerNodes, removeFormerNode } from './former-nodes.ts';
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

it('go with what they stored; what others put there stays', () => {
  for (const name of ['node-1', 'node-2']) nodeIn(name);
  writeFileSync(join(dataDir, 'node-2', 'thesis'), 'x');
  for (const dir of formerNodes(dataDir, 1)) removeFormerNode(dir);
  expect(readdirSync(dataDir)).toEqual(['node-2']);
  expect(readdirSync(join(dataDir, 'node-2'))).toEqual(['thesis']);
  expect(formerNodes(dataDir, 1)).toEqual([]);
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

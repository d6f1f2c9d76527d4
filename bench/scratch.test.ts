/** What killed runs left is removed, and nothing else. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it } from 'vitest';
import { makeScratch } from './scratch.ts';

it('removes the folder of a run that was killed, and leaves those of runs that live and of others', async () => {
  const root = join(mkdtempSync(join(tmpdir(), 'kvtier-scratch-')), 'scratch');
  const other = spawn(process.execPath, ['-e', 'setInterval(() => {}, 1000)']);
  try {
    const [theirs, foreign] = [join(root, `prefix-cache-${other.pid}`), join(root, 'notes')];
    for (const path of [theirs, foreign]) {
      mkdirSync(path, { recursive: true });
      writeFileSync(join(path, 'data'), 'data');
    }
    const own = makeScratch(root, 'redis');
    expect([theirs, foreign, own].map((path) => existsSync(path))).toEqual([true, true, true]);
    other.kill('SIGKILL');
    await once(other, 'exit');
    writeFileSync(join(own, 'data'), 'of an earlier process with this number');
    expect(makeScratch(root, 'redis')).toBe(own);
    expect([theirs, foreign, own, join(own, 'data')].map((path) => existsSync(path))).toEqual([
      false,
      true,
      true,
      false,
    ]);
  } finally {
    other.kill('SIGKILL');
    rmSync(join(root, '..'), { recursive: true, force: true });
  }
});

/** A node's process without its arena's file ends by itself, in order, and by its exit code says that it failed. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { text } from 'node:stream/consumers';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const root = fileURLToPath(new URL('../../../..', import.meta.url));

it('a process whose arena is removed ends with 1 and leaves nothing', async () => {
  const [folder, memory] = [join(tmpdir(), 'kvtier-'), '/dev/shm/kvtier-test-'].map((name) => mkdtempSync(name));
  onTestFinished(() => [folder, memory].forEach((path) => void rmSync(path!, { recursive: true })));
  const socketPath = join(folder!, 'run', 'node.sock');
  const config = { socketPath, dataDir: join(folder!, 'data'), arena: { bytes: 1 << 20, dir: memory }, disk: null };
  const child = spawn(process.execPath, ['--import', 'tsx', 'services/cache-node/src/main.ts'], {
    cwd: root,
    stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
    env: { ...process.env, KVTIER_CONFIG: JSON.stringify(config) },
  });
  onTestFinished(() => void child.kill('SIGKILL'));
  const said = Promise.all([text(child.stdout!), text(child.stderr!)]);
  const [{ ready }] = (await once(child, 'message')) as [{ ready: { arenaPath: string } }];
  rmSync(ready.arenaPath);
  expect(await once(child, 'exit')).toEqual([1, null]);
  expect((await said).join('')).toContain("the arena's file was removed by somebody else");
  expect(readdirSync(memory!)).toEqual([]);
  expect(readdirSync(join(folder!, 'run'))).toEqual([]);
});

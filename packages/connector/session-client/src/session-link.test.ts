/** Whose node it is, asked before anything is said to it. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { chmodSync, mkdtempSync, rmSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { SessionLink } from './session-link.ts';
import { realTimers } from './timers.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-link-'));
});
afterEach(() => rmSync(folder, { recursive: true, force: true }));

const connect = (path: string) => SessionLink.connect(path, null, realTimers, () => {});

// Needs another user.
it.runIf(process.getuid!() === 0)('a node of another user is left alone', async () => {
  const path = join(folder, 's');
  chmodSync(folder, 0o777);
  const script = `require('node:net').createServer().listen(${JSON.stringify(path)}, () => process.stdout.write('listening'));`;
  const stdio = ['ignore', 'pipe', 'inherit'] as const;
  const other = spawn(process.execPath, ['-e', script], { uid: 65_534, gid: 65_534, stdio: [...stdio] });
  await once(other.stdout!, 'data');
  chmodSync(folder, 0o755);
  await expect(connect(path)).rejects.toMatchObject({
    code: 'SETUP',
    message: `${path}: is served by a process of user 65534 (pid ${other.pid}), not by ours; end it or choose a private folder`,
  });
  other.kill();
  await once(other, 'close');
});

it('a node in a folder that others may write to is left alone; ours is not', async () => {
  const path = join(folder, 's');
  const server = createServer();
  server.listen(path);
  await once(server, 'listening');
  chmodSync(folder, 0o1777);
  await expect(connect(path)).rejects.toMatchObject({ code: 'SETUP' });
  chmodSync(folder, 0o755);
  const link = await connect(path);
  expect(link.usable).toBe(true);
  link.end(new KvError('DISCONNECTED', 'the test is over'));
  server.close();
});

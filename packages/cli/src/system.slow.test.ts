/** A system's start that fails when all its services run. */
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { parseUp } from './options.ts';
import { startSystem } from './system.ts';

let dataDir: string;
beforeEach(() => {
  dataDir = mkdtempSync(join(tmpdir(), 'kvtier-system-'));
});
afterEach(() => {
  for (const pid of services()) process.kill(pid, 'SIGKILL');
  rmSync(dataDir, { recursive: true, force: true });
});

/** Process ids of those that were told of our data folder. */
function services(): number[] {
  const told = (pid: string): string => {
    try {
      return readFileSync(`/proc/${pid}/environ`, 'latin1');
    } catch {
      return '';
    }
  };
  const pids = readdirSync('/proc').filter((name) => /^\d+$/.test(name));
  return pids.filter((pid) => told(pid).includes(dataDir)).map(Number);
}

it('ends with what is told of it, and no service goes on', async () => {
  mkdirSync(join(dataDir, 'node-1', 'segments'), { recursive: true });
  writeFileSync(join(dataDir, 'node-1', 'node.lock'), '');
  let running = 0;
  const onEvent = (message: string): void => {
    if (!message.includes('there is no such node any more')) return;
    running = services().length;
    throw new Error('nobody listens');
  };
  const options = parseUp(['--port', '0', '--data-dir', dataDir, '--arena-bytes', '16MiB', '--disk-bytes', '64MiB'])!;
  await expect(startSystem(options, { onLine: () => {}, onEvent })).rejects.toThrow('nobody listens');
  expect([running > 0, services()]).toEqual([true, []]);
  // The data folder is nobody's.
  const system = await startSystem(options, { onLine: () => {}, onEvent: () => {} });
  await system.stop();
});

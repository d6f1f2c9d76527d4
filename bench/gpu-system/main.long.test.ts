/** That a case which is ended from outside leaves nothing behind that holds a GPU: not even what takes no notice of a signal. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { bundled } from '../../scripts/lib/test-programs.mjs';

const [program] = await bundled(new URL('./main.ts', import.meta.url));
/** A model's start takes some seconds of CPU, and on a busy machine waits for its turn. */
const patience = { timeout: 120_000 };

let folder = '';
let launched: number[] = [];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-gpu-main-'));
  launched = [];
});
afterEach(() => {
  for (const pid of launched.filter(isRunning)) process.kill(pid, 'SIGKILL');
  for (const scratch of readdirSync(folder)) {
    for (const dataDir of readdirSync(join(folder, scratch)))
      removeStaleArenas(join(folder, scratch, dataDir), '/dev/shm');
  }
  rmSync(folder, { recursive: true, force: true });
});

function descendants(pid: number): number[] {
  const text = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim();
  return text === '' ? [] : text.split(' ').flatMap((child) => [Number(child), ...descendants(Number(child))]);
}

/** What was killed, and not reaped yet, holds nothing. */
function isRunning(pid: number): boolean {
  try {
    return !/^\d+ \(.*\) [ZX]/s.test(readFileSync(`/proc/${pid}/stat`, 'utf8'));
  } catch {
    return false;
  }
}

it('ended by timeout in the middle of a case, it takes with it what it has launched, also what hangs', async () => {
  const running = spawn('timeout', ['600', process.execPath, program!, 'cpu', 'random:1m', '600'], {
    env: { ...process.env, KVTIER_BENCH_DIR: folder },
    stdio: ['ignore', 'pipe', 'inherit'],
    detached: true, // timeout signals its process group
  });
  let said = '';
  running.stdout.setEncoding('utf8').on('data', (text: string) => {
    said += text;
  });
  const ended = once(running, 'exit');
  await expect.poll(() => said, patience).toContain('start_first_token_1m');
  const [main, ...others] = descendants(running.pid!);
  launched = others;
  expect(others.length).toBeGreaterThanOrEqual(4); // supervisor, cache node, worker, coordinator
  for (const pid of others) process.kill(pid, 'SIGSTOP');
  running.kill('SIGTERM');
  const [code] = await ended;
  await expect.poll(() => [main!, ...others].filter(isRunning)).toEqual([]);
  expect(code).toBe(143);
});

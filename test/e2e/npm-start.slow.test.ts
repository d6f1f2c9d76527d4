/**
 * `npm start` as process managers and containers run it: whatever ends npm ends the whole system, in its time and without a trace,
 * while a file system call hangs in each of its processes.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { hungCall } from '@kvtier/telemetry/testing';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { root } from '../style/tree.ts';
import { Machine, smallBudgets } from './kvtier-up.ts';

let machine: Machine;
let npm: ChildProcess | undefined;
let pids: number[] = [];
beforeEach(() => {
  machine = new Machine();
});
afterEach(async () => {
  for (const pid of [npm?.pid, ...pids]) if (pid !== undefined && isRunning(pid)) process.kill(pid, 'SIGKILL');
  await machine.close();
});

const read = (path: string): string => {
  try {
    return readFileSync(path, 'utf8').trim();
  } catch {
    return '';
  }
};
/** A killed process that nobody has reaped yet holds nothing any more. */
const isRunning = (pid: number): boolean => /^State:\s+[^ZX]/m.test(read(`/proc/${pid}/status`));
const below = (pid: number): number[] =>
  read(`/proc/${pid}/task/${pid}/children`)
    .split(' ')
    .filter((text) => text !== '')
    .flatMap((text) => [Number(text), ...below(Number(text))]);
const serviceOf = (pid: number): string | undefined => /services\/([a-z-]+)\//.exec(read(`/proc/${pid}/cmdline`))?.[1];

/** Resolves when the system is up. */
async function start(): Promise<{ said: () => string }> {
  const flags = ['--port', '0', '--data-dir', machine.dataDir, ...smallBudgets];
  const child = spawn('npm', ['start', '--silent', '--', ...flags], {
    cwd: root,
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { ...process.env, NODE_OPTIONS: hungCall(machine.folder, `${root}/`) },
  });
  npm = child;
  let said = '';
  let greeting = '';
  child.stderr.on('data', (bytes) => {
    said += bytes;
  });
  child.stdout.on('data', (bytes) => {
    greeting += bytes;
  });
  await vi.waitUntil(() => /kvtier is up/.test(greeting) || child.exitCode !== null, { timeout: 60_000 });
  expect(said, said).toBe('');
  pids = below(child.pid!).filter((pid) => read(`/proc/${pid}/cmdline`) !== '');
  expect(pids.flatMap((pid) => serviceOf(pid) ?? []).toSorted()).toEqual([
    'cache-node',
    'coordinator',
    'engine-worker',
  ]);
  return { said: () => said };
}

describe('npm start', () => {
  it.each(['SIGINT', 'SIGHUP'] as const)('%s to npm ends all of it', async (signal) => {
    const { said } = await start();
    npm!.kill(signal);
    await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
    await vi.waitUntil(() => npm!.exitCode !== null || npm!.signalCode !== null, { timeout: 30_000 });
    expect(machine.left()).toEqual([]);
    expect(said()).toBe('');
  });

  it('its services end when the supervisor is killed, and leave nothing but its run folder', async () => {
    await start();
    const supervisor = pids.find((pid) => read(`/proc/${pid}/cmdline`).includes('scripts/start.mjs'))!;
    process.kill(supervisor, 'SIGKILL');
    await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
    expect(machine.left().filter((path) => path.startsWith('/dev/shm'))).toEqual([]);
  });

  it('a system that a program has launched ends with it', async () => {
    const script = `
      import { launch } from '@kvtier/cli';
      const system = await launch(${JSON.stringify(['--port', '0', '--data-dir', machine.dataDir, ...smallBudgets])});
      console.log(JSON.stringify(system.pids()));`;
    const program = spawn(
      process.execPath,
      ['--import', import.meta.resolve('tsx'), '--input-type=module', '--eval', script],
      { cwd: root, stdio: ['ignore', 'pipe', 'inherit'] },
    );
    const [text] = (await once(program.stdout, 'data')) as [Buffer];
    pids = JSON.parse(text.toString()) as number[];
    expect(pids.filter(isRunning)).toHaveLength(4);
    program.kill('SIGKILL');
    await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
    expect(machine.left()).toEqual([]);
  });

  it('starts again each service that crashed or was told to end; SIGTERM to npm ends all of it', async () => {
    const { said } = await start();
    for (const [signal, code] of [
      ['SIGUSR2', 1],
      ['SIGTERM', 0],
    ] as const) {
      const victims = below(npm!.pid!).filter(serviceOf);
      // How soon depends on how long it lived, which is this machine's affair.
      const stories = victims.map(
        (pid) => `kvtier: ${serviceOf(pid)} ended with exit code ${code}; starting it again in `,
      );
      for (const pid of victims) process.kill(pid, signal);
      await vi.waitUntil(() => !victims.some(isRunning), { timeout: 12_000 });
      await vi.waitUntil(() => stories.every((story) => said().includes(story)), { timeout: 30_000 });
      const isBack = (story: string): boolean =>
        said()
          .split(story)[1]!
          .includes(`${story.split(' ended')[0]} is back\n`);
      await vi.waitUntil(() => stories.every(isBack), { timeout: 60_000 });
    }
    pids = below(npm!.pid!);
    npm!.kill('SIGTERM');
    await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
    expect(machine.left()).toEqual([]);
  });
});

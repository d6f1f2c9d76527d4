/**
 * `npm start` as process managers and containers run it: whatever ends npm ends the whole system, in its time and without a trace,
 * while a file system call hangs in each of its processes.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { hungCall } from '@kvtier/telemetry/testing';
import { describe, expect, it, vi } from 'vitest';
import { root } from '../style/tree.ts';
import { Machine, smallBudgets } from './kvtier-up.ts';

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

interface System {
  readonly npm: ChildProcess;
  /** Of npm's descendants that have a command line. */
  readonly pids: readonly number[];
  said(): string;
}

/** What a test has for itself, so that several run side by side. */
class Place {
  readonly machine = new Machine();
  /** Processes that end with the test. */
  readonly own: number[] = [];

  async close(): Promise<void> {
    const pids = this.own.flatMap((pid) => [pid, ...below(pid)]);
    for (const pid of new Set(pids)) if (isRunning(pid)) process.kill(pid, 'SIGKILL');
    await this.machine.close();
  }
}

const placed =
  (test: (place: Place) => Promise<void>): (() => Promise<void>) =>
  async () => {
    const place = new Place();
    try {
      await test(place);
    } finally {
      await place.close();
    }
  };

/** Resolves when the system is up. */
async function start({ machine: { dataDir, folder }, own }: Place): Promise<System> {
  const flags = ['--port', '0', '--data-dir', dataDir, ...smallBudgets];
  const npm = spawn('npm', ['start', '--silent', '--', ...flags], {
    cwd: root,
    stdio: ['ignore', 'pipe', 'pipe'],
    env: { ...process.env, NODE_OPTIONS: hungCall(folder, `${root}/`) },
  });
  let said = '';
  let greeting = '';
  npm.stderr.on('data', (bytes) => {
    said += bytes;
  });
  npm.stdout.on('data', (bytes) => {
    greeting += bytes;
  });
  own.push(npm.pid!);
  await vi.waitUntil(() => /kvtier is up/.test(greeting) || npm.exitCode !== null, { timeout: 120_000 });
  expect(said, said).toBe('');
  const pids = below(npm.pid!).filter((pid) => read(`/proc/${pid}/cmdline`) !== '');
  own.push(...pids);
  expect(pids.flatMap((pid) => serviceOf(pid) ?? []).toSorted()).toEqual([
    'cache-node',
    'coordinator',
    'engine-worker',
  ]);
  return { npm, pids, said: () => said };
}

describe('npm start', () => {
  // Most of their time is one process waiting for another.
  describe.concurrent('ends', () => {
    it.each(['SIGINT', 'SIGHUP'] as const)('at %s to npm, all of it', (signal) =>
      placed(async (place) => {
        const { npm, pids, said } = await start(place);
        npm.kill(signal);
        await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
        await vi.waitUntil(() => npm.exitCode !== null || npm.signalCode !== null, { timeout: 30_000 });
        expect(place.machine.left()).toEqual([]);
        expect(said()).toBe('');
      })(),
    );

    it(
      'with the program that has launched it',
      placed(async ({ machine, own }) => {
        const flags = ['--port', '0', '--data-dir', machine.dataDir, ...smallBudgets];
        const script = `
          import { launch } from '@kvtier/cli';
          const system = await launch(${JSON.stringify(flags)});
          console.log(JSON.stringify(system.pids()));`;
        const program = spawn(
          process.execPath,
          ['--import', import.meta.resolve('tsx'), '--input-type=module', '--eval', script],
          { cwd: root, stdio: ['ignore', 'pipe', 'inherit'] },
        );
        own.push(program.pid!);
        const [text] = (await once(program.stdout, 'data')) as [Buffer];
        const pids = JSON.parse(text.toString()) as number[];
        own.push(...pids);
        expect(pids.filter(isRunning)).toHaveLength(4);
        program.kill('SIGKILL');
        await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
        expect(machine.left()).toEqual([]);
      }),
    );
  });

  it(
    'its services end when the supervisor is killed, and leave nothing but its run folder',
    placed(async (place) => {
      const { pids } = await start(place);
      const supervisor = pids.find((pid) => read(`/proc/${pid}/cmdline`).includes('scripts/start.mjs'))!;
      process.kill(supervisor, 'SIGKILL');
      await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
      expect(place.machine.left().filter((path) => path.startsWith('/dev/shm'))).toEqual([]);
    }),
  );

  it(
    'starts again each service that crashed or was told to end; SIGTERM to npm ends all of it',
    placed(async (place) => {
      const { npm, said } = await start(place);
      for (const [signal, code] of [
        ['SIGUSR2', 1],
        ['SIGTERM', 0],
      ] as const) {
        const victims = below(npm.pid!).filter(serviceOf);
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
      const pids = below(npm.pid!);
      place.own.push(...pids);
      npm.kill('SIGTERM');
      await vi.waitUntil(() => !pids.some(isRunning), { timeout: 12_000 });
      expect(place.machine.left()).toEqual([]);
    }),
  );
});

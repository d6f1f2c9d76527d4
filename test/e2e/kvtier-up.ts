/** For the end-to-end tests: `kvtier up` as a user starts it, and what it may leave behind. */

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdtempSync, readdirSync, readFileSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type Launched, launch, program, waitUntilServing } from '@kvtier/cli';
import { placeId } from '@kvtier/data-plane/places';

export const smallBudgets = ['--arena-bytes', '64MiB', '--disk-bytes', '256MiB', '--kv-bytes', '128MiB'];

export class Machine {
  readonly folder = mkdtempSync(join(tmpdir(), 'kvtier-e2e-'));
  readonly dataDir = join(realpathSync(this.folder), 'data');
  readonly #running = new Set<Launched>();

  async up(...flags: string[]): Promise<Launched> {
    const system = await launch(['--port', '0', '--data-dir', this.dataDir, ...smallBudgets, ...flags]);
    this.#running.add(system);
    // Of several engines /health does not say who is attached.
    await waitUntilServing(system.url, !['--no-tier', '--prefill', '--engines'].some((flag) => flags.includes(flag)));
    return system;
  }

  /** What exists outside of the data folder now: run folder with sockets, shared memory. */
  left(): string[] {
    if (!existsSync(this.dataDir)) return [];
    const id = placeId(this.dataDir);
    return ['/dev/shm', '/tmp', process.env.XDG_RUNTIME_DIR ?? '/tmp']
      .flatMap((dir) => readdirSync(dir).map((name) => join(dir, name)))
      .filter((path) => path.includes(`kvtier-`) && path.includes(id))
      .filter((path, index, all) => all.indexOf(path) === index);
  }

  async close(): Promise<void> {
    for (const system of this.#running) await system.killAll();
    for (const path of this.left()) rmSync(path, { recursive: true, force: true });
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/** Runs the command to its end. */
export async function kvtier(...args: string[]): Promise<{ code: number | null; stdout: string; stderr: string }> {
  const child = spawn(process.execPath, [...program('kvtier'), ...args], { stdio: 'pipe' });
  let stdout = '';
  let stderr = '';
  child.stdout.on('data', (bytes) => {
    stdout += bytes;
  });
  child.stderr.on('data', (bytes) => {
    stderr += bytes;
  });
  const [code] = (await once(child, 'close')) as [number | null];
  return { code, stdout, stderr };
}

/** Process id of a service below a running system, from its command line. */
export function pidOf(system: Launched, service: string): number {
  const pid = system.pids().find((id) => readFileSync(`/proc/${id}/cmdline`, 'utf8').includes(`services/${service}/`));
  if (pid === undefined) throw new Error(`${service} does not run`);
  return pid;
}

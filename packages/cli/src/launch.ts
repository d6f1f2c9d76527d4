/**
 * `kvtier up` as a process of its own, for whoever has to kill it: the demo, the benches, the end-to-end tests.
 *
 * Invariant: whatever way `launch` or the system ends, `stop` or `killAll` leaves none of its processes.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import { KvError } from '@kvtier/errors';
import { program } from './programs.ts';

export interface Launched {
  readonly url: string;
  readonly pid: number;
  /** The supervisor and the services that run now. */
  pids(): number[];
  /** SIGKILL for all of them at once; resolves when none is left. */
  killAll(): Promise<void>;
  /** Ctrl-C; resolves to the exit code when all have gone. */
  stop(): Promise<number>;
}

const startMs = 600_000;
const stopMs = 15_000;
const keepChars = 16_384;

/** @throws KvError with what `kvtier up` said on stderr when it did not come up */
export async function launch(args: readonly string[]): Promise<Launched> {
  const child = spawn(process.execPath, [...program('kvtier'), 'up', ...args], {
    stdio: ['ignore', 'pipe', 'pipe', 'ipc'], // by whose end it learns that we are gone
    detached: true, // Ctrl-C on our terminal is for us: we stop it in order
  });
  child.channel?.unref();
  let said = '';
  child.stderr!.setEncoding('utf8').on('data', (text: string) => {
    said = (said + text).slice(-keepChars);
  });
  const closed = once(child, 'close');
  const pids = (): number[] => (isAlive(child) ? [child.pid!, ...descendants(child.pid!)] : []);
  const killAll = async (): Promise<void> => {
    // The supervisor is held first and killed last: services that outlive it by an instant would end in order, and tidy up.
    if (isAlive(child)) signal(child.pid!, 'SIGSTOP');
    const all = pids().reverse();
    for (const pid of all) signal(pid, 'SIGKILL');
    await closed;
    await gone(all);
  };
  const giveUp = (): void => {
    for (const pid of pids()) signal(pid, 'SIGKILL');
  };
  process.once('exit', giveUp);
  void closed.then(() => process.off('exit', giveUp));

  try {
    const url = await firstUrl(child, closed, () => said);
    return {
      url,
      pid: child.pid!,
      pids,
      killAll,
      stop: async () => {
        const all = pids();
        child.kill('SIGINT');
        const timer = setTimeout(() => void killAll(), stopMs);
        const [code] = (await closed) as [number | null];
        clearTimeout(timer);
        await gone(all);
        return code ?? 1;
      },
    };
  } catch (error) {
    if (isAlive(child)) await killAll();
    throw error;
  }
}

function firstUrl(child: ChildProcess, closed: Promise<unknown>, said: () => string): Promise<string> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(
      () => reject(new KvError('DEADLINE', `kvtier up: not up after ${startMs / 1000} s`)),
      startMs,
    );
    let out = '';
    child.stdout!.setEncoding('utf8').on('data', (text: string) => {
      out = (out + text).slice(-keepChars);
      const url = /^ {2}API server\s+(https?:\/\/\S+)\/v1/m.exec(out)?.[1];
      if (!url) return;
      clearTimeout(timer);
      resolve(url);
    });
    closed.then(
      () => {
        clearTimeout(timer);
        reject(
          new KvError(
            'SETUP',
            said()
              .trim()
              .replace(/^kvtier: /gm, '') || 'kvtier up: ended without a word',
          ),
        );
      },
      (error: Error) => reject(new KvError('SETUP', `kvtier up: cannot be started (${error.message})`)),
    );
  });
}

const isAlive = (child: ChildProcess): boolean =>
  child.pid !== undefined && child.exitCode === null && child.signalCode === null;

function signal(pid: number, name: NodeJS.Signals | 0): boolean {
  try {
    return process.kill(pid, name);
  } catch {
    return false;
  }
}

/** All descendants, from /proc: they are session leaders of their own, so no process group holds them together. */
function descendants(pid: number): number[] {
  try {
    const children = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim();
    return children === ''
      ? []
      : children.split(' ').flatMap((child) => [Number(child), ...descendants(Number(child))]);
  } catch {
    return [];
  }
}

/** A killed process that nobody has reaped yet holds nothing any more. */
function isRunning(pid: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return !['Z', 'X'].includes(stat.slice(stat.lastIndexOf(')') + 2)[0]!);
  } catch {
    return false;
  }
}

async function gone(pids: readonly number[]): Promise<void> {
  const end = performance.now() + stopMs;
  while (pids.some(isRunning)) {
    if (performance.now() > end)
      throw new KvError('DEADLINE', `processes ${pids.filter(isRunning).join(', ')} do not end`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

/**
 * A network of its own for a suite that compares us with plain clients, where the system's congestion control paces (BBR): they cannot
 * choose another one, and would make a limit that is none. On a fast machine with BBR a plain client had 4.5 GB/s of a Redis that gives
 * 8 without.
 */
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';

const mark = 'KVTIER_BENCH_UNPACED';
const ip = (...args: readonly string[]): void => {
  execFileSync('ip', args, { stdio: ['ignore', 'ignore', 'pipe'] });
};
const setting = '/proc/sys/net/ipv4/tcp_congestion_control';

/** Of the calling process's network. */
export const isPaced = (): boolean => readFileSync(setting, 'latin1').startsWith('bbr');

/** Reno, which every network may have, in this namespace. */
export function unpace(space: string): void {
  ip('netns', 'exec', space, 'sysctl', '-qw', 'net.ipv4.tcp_congestion_control=reno');
}

/**
 * Runs this same command again in a namespace with Reno and returns its exit code; undefined: nothing paces here, or it cannot be
 * helped, which `log` is told.
 */
export async function againUnpaced(log: (line: string) => void): Promise<number | undefined> {
  if (!isPaced() || process.env[mark] !== undefined) return undefined;
  const space = `kvbench${process.pid}`;
  try {
    ip('netns', 'add', space);
    ip('-n', space, 'link', 'set', 'lo', 'up');
    unpace(space);
  } catch (error) {
    log(`plain clients are paced here (BBR), which flatters us: ${(error as Error).message.trim()}; run as root`);
    remove(space);
    return undefined;
  }
  const command = [process.execPath, ...process.execArgv, ...process.argv.slice(1)];
  const again = spawn('ip', ['netns', 'exec', space, ...command], {
    stdio: 'inherit',
    env: { ...process.env, [mark]: '1' },
  });
  const pass = (signal: NodeJS.Signals): void => void again.kill(signal);
  for (const signal of ['SIGINT', 'SIGTERM'] as const) process.on(signal, pass);
  const [code] = (await once(again, 'exit')) as [number | null];
  remove(space);
  return code ?? 1;
}

function remove(space: string): void {
  try {
    ip('netns', 'del', space);
  } catch {
    // it was never made
  }
}

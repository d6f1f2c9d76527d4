/**
 * A network of its own for a suite that compares us with plain clients, where the system's congestion control paces (BBR): they cannot
 * choose another one, and would make a limit that is none. On a fast machine with BBR a plain client had 4.5 GB/s of a Redis that gives
 * 8 without.
 */
import { execFileSync, spawn } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';

const mark = 'KVTIER_BENCH_UNPACED';
const setting = '/proc/sys/net/ipv4/tcp_congestion_control';
/** Reno, which every network may have; and loopback, which a new one has not. */
const begin = `ip link set lo up && echo reno > ${setting}`;

/** Of the calling process's network. */
export const isPaced = (): boolean => readFileSync(setting, 'latin1').startsWith('bbr');

/** Reno in this namespace. */
export function unpace(space: string): void {
  execFileSync('ip', ['netns', 'exec', space, 'sh', '-c', begin], { stdio: ['ignore', 'ignore', 'pipe'] });
}

/**
 * Runs this same command again in a network with Reno, which ends with it, and returns its exit code; undefined: nothing paces here, or
 * it cannot be helped, which `log` is told.
 */
export async function againUnpaced(log: (line: string) => void): Promise<number | undefined> {
  if (!isPaced() || process.env[mark] !== undefined) return undefined;
  const within = (script: string, ...rest: readonly string[]): string[] => ['--net', 'sh', '-c', script, 'sh', ...rest];
  try {
    execFileSync('unshare', within(begin), { stdio: ['ignore', 'ignore', 'pipe'] });
  } catch (error) {
    log(`plain clients are paced here (BBR), which flatters us: ${(error as Error).message.trim()}; run as root`);
    return undefined;
  }
  const command = [process.execPath, ...process.execArgv, ...process.argv.slice(1)];
  const env = { ...process.env, [mark]: '1' };
  const again = spawn('unshare', within(`${begin} && exec "$@"`, ...command), { stdio: 'inherit', env });
  for (const signal of ['SIGINT', 'SIGTERM'] as const) process.on(signal, () => again.kill(signal));
  const [code] = (await once(again, 'exit')) as [number | null];
  return code ?? 1;
}

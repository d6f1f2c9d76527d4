/**
 * How many cores a process may use. Node 20 (libuv below 1.49) sees the cores that it may run on and no quota: a container with two of 64
 * cores would compute with 64 threads, and stand still for most of each period. Source: the kernel's cgroup-v2, "cpu.max".
 */
import { readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { join } from 'node:path';

/** Of a text "QUOTA PERIOD" in microseconds, a part of a core counted as one; of "max PERIOD", and of any other, all there are. */
export function coresOfQuota(text: string): number {
  const [quota, period] = (/^(\d+) (\d+)\s*$/.exec(text) ?? []).slice(1).map(Number);
  return quota && period ? Math.ceil(quota / period) : Number.POSITIVE_INFINITY;
}

/** What this machine gives the process: by its own control group (v2) and by those above it. */
export function usableCores(groupFile = '/proc/self/cgroup', root = '/sys/fs/cgroup'): number {
  const own = /^0::\/(.*)$/m.exec(textOf(groupFile))?.[1];
  if (own === undefined) return availableParallelism();
  const names = own.split('/').filter((name) => name !== '');
  const folders = [...names.keys(), names.length].map((depth) => join(root, ...names.slice(0, depth)));
  const quotas = folders.map((folder) => coresOfQuota(textOf(join(folder, 'cpu.max'))));
  return Math.min(availableParallelism(), ...quotas);
}

/** '' where there is none: other systems of control groups, the host's own root. */
function textOf(file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch {
    return '';
  }
}

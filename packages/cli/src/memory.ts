/** Memory that a process of ours may still take. */
import { readFileSync } from 'node:fs';

/**
 * Bytes: of this machine, or of our control group where that has less. Node takes a group's cached files for memory in use, though the
 * kernel gives it to whoever asks. What cannot be read counts as none cached.
 */
export function freeMemory(groupFile = '/proc/self/cgroup', root = '/sys/fs/cgroup'): number {
  const limitBytes = process.constrainedMemory();
  const freeBytes = process.availableMemory();
  // Without a limit it is the machine's own figure, which counts cached files as free.
  if (limitBytes === 0 || limitBytes >= 2 ** 50) return freeBytes;
  return Math.min(limitBytes, freeBytes + cachedBytes(groupFile, root));
}

function cachedBytes(groupFile: string, root: string): number {
  try {
    const group = /^0::(.*)$/m.exec(readFileSync(groupFile, 'utf8'))?.[1] ?? '';
    const stat = readFileSync(`${root}${group}/memory.stat`, 'utf8');
    return [...stat.matchAll(/^(?:in)?active_file (\d+)$/gm)].reduce((bytes, [, each]) => bytes + Number(each), 0);
  } catch {
    return 0;
  }
}

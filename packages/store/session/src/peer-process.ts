/**
 * The process at the other end of a session. A pid alone may be used again; with its start time it names one process
 * for ever (proc(5), field 22 of /proc/PID/stat).
 */
import { readFileSync } from 'node:fs';

export interface PeerProcess {
  /** 0: in a pid namespace that is not visible from here. */
  readonly pid: number;
  /** '' when /proc does not say. */
  readonly startTicks: string;
}

/** Start time of a live process; undefined when it is gone or a zombie (its memory maps, and so its copies, are gone). */
function readStartTicks(pid: number): string | undefined {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' '); // from field 3 on; the name may hold anything
    return fields[0] === 'Z' || fields[0] === 'X' ? undefined : fields[19];
  } catch {
    return undefined;
  }
}

export function peerProcess(pid: number): PeerProcess {
  return { pid, startTicks: pid > 0 ? (readStartTicks(pid) ?? '') : '' };
}

/** False only when the process has certainly ended. */
export function isAlive(peer: PeerProcess): boolean {
  if (peer.pid <= 0) return true;
  const now = readStartTicks(peer.pid);
  if (now !== undefined) return peer.startTicks === '' || now === peer.startTicks;
  try {
    process.kill(peer.pid, 0);
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
  return peer.startTicks === ''; // alive by kill(2), yet no /proc entry that we ever saw, or a zombie
}

export function isSameProcess(a: PeerProcess, b: PeerProcess): boolean {
  return a.pid === b.pid && a.startTicks === b.startTicks;
}

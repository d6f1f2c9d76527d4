/** What is kept from start to start, and can be made again: digests, made-up models, what was measured of a machine. */
import { homedir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';

/** `~/.cache/kvtier`, or below XDG_CACHE_HOME. @throws KvError CONFIG: this user has no home folder */
export function cacheDir(env = process.env): string {
  const base = env.XDG_CACHE_HOME;
  return join(base?.startsWith('/') ? base : join(home(), '.cache'), 'kvtier');
}

function home(): string {
  try {
    return homedir();
  } catch {
    throw new KvError('CONFIG', 'this user has no home folder; set HOME or XDG_CACHE_HOME to a folder of its own');
  }
}

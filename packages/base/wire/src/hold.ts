/**
 * How a cache node learns that nobody copies for a session any more where it cannot see processes: who maps the arena holds a lock on a
 * byte of the file beside it (`Hold` in session.proto). The kernel ends it with the process.
 */
import { closeSync, constants, openSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { lockFileOf } from '@kvtier/data-plane/places';

/** Holds the byte; gives back how that ends, or null where it cannot be held. */
export function holdArena(arenaPath: string, byte: number): (() => void) | null {
  let fd: number;
  try {
    fd = openSync(lockFileOf(arenaPath), constants.O_RDONLY | constants.O_NOFOLLOW);
  } catch {
    return null;
  }
  if (native.holdByte(fd, byte)) return () => closeSync(fd);
  closeSync(fd);
  return null;
}

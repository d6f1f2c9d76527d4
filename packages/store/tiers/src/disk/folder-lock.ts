/**
 * Whose folder it is: a lock on the file `lock` in it, for as long as a device uses what lies there.
 *
 * Invariant: after `take` the file under that name is the one whose lock is held. Whoever removes the folder takes the name away from the
 * lock, and another node may hold the one that was made in its place.
 */
import { statSync } from 'node:fs';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';

interface Held {
  readonly lock: number;
  readonly device: bigint;
  readonly inode: bigint;
}

export class FolderLock {
  readonly #dir: string;
  #held: Held | undefined;

  constructor(dir: string) {
    this.#dir = dir;
  }

  /**
   * Again, after an outage, of the folder that is there now. Of a device that answers: it asks the file system in this thread.
   * @throws KvError LOCKED: another one has it; IO: the folder lies on another file system than before
   */
  take(): void {
    const path = join(this.#dir, 'lock');
    const held = this.#held;
    if (held !== undefined) {
      const now = statSync(path, { bigint: true, throwIfNoEntry: false });
      if (now?.ino === held.inode && now.dev === held.device) return;
      if (statSync(this.#dir, { bigint: true }).dev !== held.device) {
        const remedy = 'mount what was there, or start the node again';
        throw new KvError('IO', `${this.#dir}: lies on another file system than before; ${remedy}`);
      }
    }
    const lock = locked(path);
    const { dev, ino } = statSync(path, { bigint: true });
    this.release();
    this.#held = { lock, device: dev, inode: ino };
  }

  release(): void {
    if (this.#held !== undefined) native.unlock(this.#held.lock);
    this.#held = undefined;
  }
}

function locked(path: string): number {
  try {
    return native.lockFile(path);
  } catch (error) {
    throw KvError.from(error, 'IO');
  }
}

/**
 * Whose folder it is: a lock on the file `lock` in it, for as long as a device uses what lies there.
 *
 * Invariant: after `take` the file under that name is the one whose lock is held. Whoever removes the folder takes the name away from the
 * lock, and another node may hold the one that was made in its place.
 */
import { dirname, join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';

const onAnother = 'lies on another file system than before; mount what was there, or start the node again';

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
   * The folder that was taken is there no more, and one that is made lies on the same file system. Asks it in this thread, too.
   * @throws KvError IO: it would lie on another one, as below a mount that has gone
   */
  isGone(): boolean {
    const held = this.#held;
    if (held === undefined || native.fileIdentity(this.#dir) !== null) return false;
    let above = dirname(this.#dir);
    while (native.fileIdentity(above) === null) above = dirname(above);
    if (native.fileIdentity(above)?.device !== held.device) {
      throw new KvError('IO', `${this.#dir}: is gone, and its place ${onAnother}`);
    }
    return true;
  }

  /**
   * Again, after an outage, of the folder that is there now. Of a device that answers: it asks the file system in this thread.
   * @throws KvError LOCKED: another one has it; IO: the folder lies on another file system than before
   */
  take(): void {
    const path = join(this.#dir, 'lock');
    const held = this.#held;
    if (held !== undefined) {
      const now = native.fileIdentity(path);
      if (now?.inode === held.inode && now.device === held.device) return;
      if (native.fileIdentity(this.#dir)?.device !== held.device) {
        throw new KvError('IO', `${this.#dir}: ${onAnother}`);
      }
    }
    const lock = locked(path);
    const now = native.fileIdentity(path);
    if (now === null) {
      native.unlock(lock);
      throw new KvError('IO', `${path}: was removed while it was locked; the folder is not ours alone`);
    }
    this.release();
    this.#held = { lock, ...now };
  }

  /** Else the device did not answer yet. */
  get wasTaken(): boolean {
    return this.#held !== undefined;
  }

  /** The folder is there, and nobody else's by now. Asks the file system in this thread, too. */
  isOurs(): boolean {
    const held = this.#held;
    const now = held && native.fileIdentity(join(this.#dir, 'lock'));
    return now != null && now.inode === held!.inode && now.device === held!.device;
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

/**
 * Whose folder it is: a lock on the file `lock` in it, for as long as a device uses what lies there. All that asks the file system does it
 * on the device's own thread, within its time limit, but for closing the file.
 *
 * Invariant: after `take` the file under that name is the one whose lock is held. Whoever removes the folder takes the name away from the
 * lock, and another node may hold the one that was made in its place.
 */
import { dirname, join } from 'node:path';
import { type FileIdentity, native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { DeviceFiles } from './device-files.ts';

const onAnother = 'lies on another file system than before; mount what was there, or start the node again';

const tooLate = (path: string): KvError => new KvError('IO', `${path}: was locked when nobody waited for it any more`);

type Held = Awaited<ReturnType<typeof native.fileLock>>;

export class FolderLock {
  readonly #dir: string;
  readonly #files: DeviceFiles;
  #held: Held | undefined;
  #isReleased = false;

  constructor(dir: string, files: DeviceFiles) {
    this.#dir = dir;
    this.#files = files;
  }

  /**
   * The folder that was taken is there no more, and one that is made lies on the same file system.
   * @throws KvError IO: it would lie on another one, as below a mount that has gone
   */
  async isGone(): Promise<boolean> {
    const held = this.#held;
    if (held === undefined || (await this.#identity(this.#dir)) !== null) return false;
    let above = dirname(this.#dir);
    let found = await this.#identity(above);
    for (; found === null; found = await this.#identity(above)) above = dirname(above);
    if (found.device !== held.device) throw new KvError('IO', `${this.#dir}: is gone, and its place ${onAnother}`);
    return true;
  }

  /**
   * Again, after an outage, of the folder that is there now.
   * @throws KvError LOCKED: another one has it; IO: the folder lies on another file system than before; with `errno`: it cannot be asked
   */
  async take(): Promise<void> {
    const path = join(this.#dir, 'lock');
    const held = this.#held;
    if (held !== undefined) {
      if (await this.isOurs()) return;
      if ((await this.#identity(this.#dir))?.device !== held.device) {
        throw new KvError('IO', `${this.#dir}: ${onAnother}`);
      }
    }
    const taken = await this.#taken(path);
    this.#unlock();
    this.#held = taken;
    if (!this.#isReleased) return;
    this.#unlock();
    throw tooLate(path);
  }

  /** Else the device did not answer yet. */
  get wasTaken(): boolean {
    return this.#held !== undefined;
  }

  /** The folder is there, and nobody else's by now. */
  async isOurs(): Promise<boolean> {
    const held = this.#held;
    const now = held && (await this.#identity(join(this.#dir, 'lock')));
    return now != null && now.inode === held!.inode && now.device === held!.device;
  }

  /** For good: a try that is under way takes nothing any more. */
  release(): void {
    this.#isReleased = true;
    this.#unlock();
  }

  #unlock(): void {
    if (this.#held !== undefined) native.unlock(this.#held.lock);
    this.#held = undefined;
  }

  #identity(path: string): Promise<FileIdentity | null> {
    return this.#files.run((files) => native.fileIdentity(files, path));
  }

  /** A call that was given up may have the lock in the end: then nobody waits for it, and it would be in the way of the next try. */
  async #taken(path: string): Promise<Held> {
    let isAwaited = true;
    try {
      return await this.#files.run(async (files) => {
        const taken = await native.fileLock(files, path);
        if (isAwaited) return taken;
        native.unlock(taken.lock);
        throw tooLate(path);
      });
    } catch (error) {
      isAwaited = false;
      throw (error as { errno?: number }).errno === undefined ? KvError.from(error, 'IO') : error;
    }
  }
}

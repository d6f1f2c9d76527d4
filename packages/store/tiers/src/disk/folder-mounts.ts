/**
 * On which mounts the folders of a tier lie, remembered in a file beside the node's own: a disk that is not mounted at a start leaves an
 * empty folder, or room for one, on the file system below, which is not to be filled in its place.
 *
 *     {"DIR": {"mount": "MOUNT POINT", "lock": "inode of DIR/lock"}, ...}
 *
 * Mount points by path: numbers of devices change from one boot to the next. A folder that lies on less than before is taken all the
 * same when its lock file is the one that it had: then only the mounts are others. What cannot be read of the file counts as not known.
 */
import { readFile, rename, writeFile } from 'node:fs/promises';
import { dirname, join, resolve } from 'node:path';
import type { FileIdentity } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { Log } from '@kvtier/runtime';
import { NotMountedError } from './broken.ts';

interface Known {
  readonly mount: string;
  readonly lock: string;
}

/** A device is kept from beginning for no longer by the disk on which this is remembered. */
const writeMs = 1_000;

/** Which file lies at a path; null: none does. */
export type AskIdentity = (path: string) => Promise<FileIdentity | null>;

export class FolderMounts {
  readonly #file: string | undefined;
  readonly #known: Map<string, Known>;
  #writing: Promise<void> = Promise.resolve();

  /** Of these folders; without a `file` nothing is remembered. Its folder is there, and nobody else writes it. */
  static async read(file: string | undefined, dirs: readonly string[]): Promise<FolderMounts> {
    const told = new Map<string, Known>();
    const found = file === undefined ? undefined : await readJson(file);
    for (const dir of dirs.map((each) => resolve(each))) {
      const { mount, lock } = (Object.hasOwn(found ?? {}, dir) && (found as Record<string, Partial<Known>>)[dir]) || {};
      if (typeof mount === 'string' && typeof lock === 'string') told.set(dir, { mount, lock });
    }
    return new FolderMounts(file, told);
  }

  private constructor(file: string | undefined, known: Map<string, Known>) {
    this.#file = file;
    this.#known = known;
  }

  /** Before anything is made there. @throws NotMountedError: it lies below where it lay before; what `ask` throws */
  async check(given: string, ask: AskIdentity): Promise<void> {
    const dir = resolve(given);
    const before = this.#known.get(dir);
    if (before === undefined) return;
    const mount = await mountOf(dir, ask);
    if (mount === before.mount || !isBelow(before.mount, mount)) return;
    if ((await ask(join(dir, 'lock')))?.inode.toString() === before.lock) return;
    const mend = `mount that, or, to use the folder where it lies now, end the node and remove ${this.#file}`;
    throw new NotMountedError(given, `before, it lay on what was mounted at ${before.mount}; ${mend}`);
  }

  /** The folder is used as it lies now. @throws what `ask` throws; where the file cannot be written, one line says so */
  async keep(given: string, ask: AskIdentity, log: Log): Promise<void> {
    const file = this.#file;
    if (file === undefined) return;
    const dir = resolve(given);
    const now = { mount: await mountOf(dir, ask), lock: (await ask(join(dir, 'lock')))?.inode.toString() ?? '' };
    const before = this.#known.get(dir);
    if (before?.mount === now.mount && before.lock === now.lock) return;
    this.#known.set(dir, now);
    const write = async (): Promise<void> => {
      await writeFile(`${file}.new`, `${JSON.stringify(Object.fromEntries(this.#known))}\n`, { mode: 0o600 });
      await rename(`${file}.new`, file);
    };
    // One after another: the devices of a tier are opened at the same time.
    this.#writing = this.#writing.then(write).catch((error: unknown) => {
      const reason = KvError.from(error).message;
      log.warn({ file, reason }, 'where the disk tier’s folders are mounted is not remembered for another start');
    });
    // Another disk's, which may hang: it is not waited for without end.
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<void>((resolve) => {
      timer = setTimeout(resolve, writeMs);
    });
    await Promise.race([this.#writing, late]);
    clearTimeout(timer);
  }
}

/** It lies, or would lie, on the file system of `/`: what is to be mounted below is not there, as far as can be told. */
export const isOnRoot = async (dir: string, ask: AskIdentity): Promise<boolean> =>
  (await mountOf(resolve(dir), ask)) === '/';

/** Of the file system that the folder lies on, or would. A bind mount of the file system that is around it is none. */
async function mountOf(dir: string, ask: AskIdentity): Promise<string> {
  let at = dir;
  let found = await ask(at);
  for (; found === null && at !== dirname(at); found = await ask(at)) at = dirname(at);
  for (;;) {
    const above = dirname(at);
    if (above === at || (await ask(above))?.device !== found?.device) return at;
    at = above;
  }
}

const isBelow = (path: string, mount: string): boolean => path.startsWith(mount.endsWith('/') ? mount : `${mount}/`);

async function readJson(file: string): Promise<object | undefined> {
  try {
    const found: unknown = JSON.parse(await readFile(file, 'utf8'));
    return typeof found === 'object' && found !== null ? found : undefined;
  } catch {
    return undefined;
  }
}

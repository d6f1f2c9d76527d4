/**
 * A model folder while a model is read from it. Each file is opened once, and whatever is wanted of it (its text, its digest, its
 * weights) is read by that one descriptor; the folder may be replaced meanwhile, as downloads and rollouts do, by renames
 * or in place. Invariant: when `readModelFolder` returns, what was read is what the folder held from the first byte to the
 * last: every file still has its name, and has not been written to. Anything else is one KvError('MODEL'), because keys and
 * values of one model must never get another's name.
 */
import { type FileHandle, open, stat } from 'node:fs/promises';
import { join } from 'node:path';
import { setTimeout as delay } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';

/** Who a file is, and when it last changed: equal facts, equal bytes. */
export interface FileFacts {
  readonly dev: bigint;
  readonly ino: bigint;
  readonly size: bigint;
  readonly mtimeNs: bigint;
  readonly ctimeNs: bigint;
}

export interface ModelFile {
  readonly path: string;
  readonly fd: number;
  readonly facts: FileFacts;
  readonly handle: FileHandle;
}

/** A file system's clock ticks every 1 to 10 ms: two changes within one tick look like one. */
const clockTickMs = 20;
/** A text file of a model folder: weights are not read so. */
const maxTextBytes = 256 * 2 ** 20;

export class ModelFolder {
  readonly dir: string;
  /** By name; null: there was none when it was asked for. */
  readonly #files = new Map<string, ModelFile | null>();
  readonly #watched = new Map<string, FileFacts | null>();

  constructor(dir: string) {
    this.dir = dir;
  }

  pathOf(name: string): string {
    return join(this.dir, name);
  }

  /** The same file whenever it is asked for; null: there is none. Throws KvError('MODEL') when it cannot be opened. */
  async file(name: string): Promise<ModelFile | null> {
    const known = this.#files.get(name);
    if (known !== undefined) return known;
    const path = this.pathOf(name);
    let handle: FileHandle;
    try {
      handle = await open(path, 'r');
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      if (code !== 'ENOENT') throw new KvError('MODEL', `${path}: cannot be read (${message})`);
      this.#files.set(name, null);
      return null;
    }
    try {
      const file = { path, handle, fd: handle.fd, facts: await settledFacts(handle, path) };
      this.#files.set(name, file);
      return file;
    } catch (error) {
      await handle.close();
      throw error;
    }
  }

  /** All of a small file; null: there is none. */
  async text(name: string): Promise<string | null> {
    const file = await this.file(name);
    if (!file) return null;
    if (file.facts.size > maxTextBytes)
      throw new KvError('MODEL', `${file.path}: ${file.facts.size} bytes are too many; fetch the model again`);
    return (await readExactly(file, 0, Number(file.facts.size))).toString('utf8');
  }

  /** A file that others read by its name belongs to the model, too: it must be the same at the end, or not there. */
  async watch(name: string): Promise<void> {
    this.#watched.set(name, await namedFacts(this.pathOf(name)));
  }

  /** Throws KvError('MODEL') when a file is not what it was when it was opened, or has lost its name to another. */
  async verify(): Promise<void> {
    for (const [name, file] of this.#files) {
      if (file && !sameFacts(file.facts, await file.handle.stat({ bigint: true }))) throw changed(file.path);
      await this.#verifyName(name, file ? file.facts : null);
    }
    for (const [name, facts] of this.#watched) await this.#verifyName(name, facts);
  }

  async #verifyName(name: string, facts: FileFacts | null): Promise<void> {
    const now = await namedFacts(this.pathOf(name));
    if (facts === null ? now !== null : now === null || !sameFacts(facts, now)) throw changed(this.pathOf(name));
  }

  async close(): Promise<void> {
    const files = [...this.#files.values()];
    this.#files.clear();
    await Promise.all(files.map((file) => file?.handle.close()));
  }
}

/**
 * What `read` returns, when the folder was the same from beginning to end. Its files are open until then.
 * @throws KvError MODEL "changed while it was loaded", also in place of what `read` failed with, and what `read` throws
 */
export async function readModelFolder<T>(dir: string, read: (folder: ModelFolder) => Promise<T>): Promise<T> {
  const folder = new ModelFolder(dir);
  try {
    let result: T;
    try {
      result = await read(folder);
    } catch (error) {
      await folder.verify(); // half of one model and half of another is damaged in many ways, for one reason
      throw error;
    }
    await folder.verify();
    return result;
  } finally {
    await folder.close();
  }
}

export function sameFacts(a: FileFacts, b: FileFacts): boolean {
  return a.dev === b.dev && a.ino === b.ino && a.size === b.size && a.mtimeNs === b.mtimeNs && a.ctimeNs === b.ctimeNs;
}

export const changed = (path: string): KvError =>
  new KvError('MODEL', `${path}: changed while it was loaded; start again`);

/** Of what has this name now; null: nothing that could be looked at. */
async function namedFacts(path: string): Promise<FileFacts | null> {
  return stat(path, { bigint: true }).catch(() => null);
}

/** Bytes `offset`.. of a file. Throws KvError('MODEL') when it ends before. */
export async function readExactly(file: ModelFile, offset: number, bytes: number): Promise<Buffer> {
  const buffer = Buffer.alloc(bytes);
  for (let done = 0; done < bytes; ) {
    const { bytesRead } = await file.handle.read(buffer, done, bytes - done, offset + done);
    if (bytesRead === 0) throw new KvError('MODEL', `${file.path}: it ends early; fetch the model again`);
    done += bytesRead;
  }
  return buffer;
}

/**
 * Facts by which a later change shows. A file that was written within this tick of the clock may be written again within it and
 * look the same: so its facts are taken when the tick is over.
 */
async function settledFacts(handle: FileHandle, path: string): Promise<FileFacts> {
  let facts = await factsOf(handle, path);
  for (let age = ageMs(facts); age >= 0 && age < clockTickMs; age = ageMs(facts)) {
    await delay(clockTickMs - age);
    const now = await factsOf(handle, path);
    if (sameFacts(facts, now)) break;
    facts = now;
  }
  return facts;
}

const ageMs = ({ ctimeNs }: FileFacts): number => Date.now() - Number(ctimeNs / 1_000_000n);

async function factsOf(handle: FileHandle, path: string): Promise<FileFacts> {
  const info = await handle.stat({ bigint: true });
  if (!info.isFile()) throw new KvError('MODEL', `${path}: no file; give a Hugging Face model folder`);
  const { dev, ino, size, mtimeNs, ctimeNs } = info;
  return { dev, ino, size, mtimeNs, ctimeNs };
}

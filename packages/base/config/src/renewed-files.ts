/**
 * Files that are renewed under whoever uses them (certificates, keys): they are looked at again every `reloadMs`, and what they make then
 * takes the place of what they made before. What cannot be read, or makes nothing (one of two files is new already), changes nothing: it is
 * told once, and tried again.
 */
import { readFile, stat } from 'node:fs/promises';
import { KvError, within } from '@kvtier/errors';
import { by, FileProblem, mayOthersRead, type NamedFile, readPem } from './read-pem.ts';

export { FileProblem, type NamedFile } from './read-pem.ts';

export interface RenewedFilesOptions<T> {
  /** In the order in which `make` gets their bytes. */
  readonly files: readonly NamedFile[];
  /** Of the bytes. @throws Error: why they are of no use; FileProblem: which of them is, else the first one is told of */
  readonly make: (bytes: readonly Buffer[]) => T;
  /** What has to be named instead: "a readable PEM file". */
  readonly file: string;
  /** The same of what `make` refuses: "a certificate and its key (PEM)". */
  readonly content: string;
  readonly reloadMs: number;
  /** Why what lies there is not in use (one line); undefined: it is. Several files may be told of to one who listens: `of` are these. */
  readonly onProblem: (why: string | undefined, of: { readonly isRefused: boolean }) => void;
}

/** Of reading the files again. */
const readLimitMs = 5_000;

export class RenewedFiles<T> {
  readonly #options: RenewedFilesOptions<T>;
  readonly #timer: NodeJS.Timeout;
  #bytes: readonly Buffer[];
  #made: T;
  #problem: string | undefined;
  #reading = false;
  #isClosed = false;
  /** Told what they make now. */
  onRenewed: (made: T) => void = () => {};

  /** @throws KvError CONFIG: a file that cannot be used */
  constructor(options: RenewedFilesOptions<T>) {
    const { files, make, file, content, reloadMs } = options;
    this.#options = options;
    this.#bytes = files.map((each) => readPem(each, file));
    try {
      this.#made = make(this.#bytes);
    } catch (error) {
      const { key, path } = whichOf(files, error);
      const remedy = error instanceof FileProblem ? error.remedy : content;
      throw new KvError('CONFIG', `${by(key)}${path}: ${(error as Error).message}; name ${remedy}`);
    }
    this.#timer = setInterval(() => void this.reload(), reloadMs);
    this.#timer.unref();
  }

  /** What they made last. */
  get made(): T {
    return this.#made;
  }

  /** What lies there is not in use, and somebody still looks for better. */
  get isRefused(): boolean {
    return this.#problem !== undefined && !this.#isClosed;
  }

  /** A look at the files; never throws. */
  async reload(): Promise<void> {
    if (this.#reading) return;
    this.#reading = true;
    const { files, make } = this.#options;
    try {
      const fresh = await within('renewed files', readLimitMs, (signal) =>
        Promise.all(files.map((file) => readAgain(file, signal))),
      );
      if (fresh.some((bytes, at) => !bytes.equals(this.#bytes[at]!))) {
        this.#made = make(fresh);
        this.#bytes = fresh;
        this.onRenewed(this.#made);
      }
      this.#tell(undefined);
    } catch (error) {
      this.#tell(
        `${whichOf(files, error).path}: not read again (${(error as Error).message}); the one before stays in use`,
      );
    } finally {
      this.#reading = false;
    }
  }

  close(): void {
    this.#isClosed = true;
    clearInterval(this.#timer);
  }

  #tell(why: string | undefined): void {
    if (why === this.#problem) return;
    this.#problem = why;
    this.#options.onProblem(why, this);
  }
}

const whichOf = (files: readonly NamedFile[], error: unknown): NamedFile =>
  files[error instanceof FileProblem ? error.at : 0]!;

/** As at the start: a secret that others may read is none. */
async function readAgain(
  { path, isSecret }: { path: string; isSecret: boolean },
  signal: AbortSignal,
): Promise<Buffer> {
  if (isSecret && mayOthersRead(await stat(path))) throw new Error('others may read it; chmod o-rwx it');
  return readFile(path, { signal });
}

/**
 * Files that are renewed under whoever uses them (certificates, keys): they are looked at again every `reloadMs`, and what they make then
 * takes the place of what they made before. What cannot be read, or makes nothing (one of two files is new already), changes nothing: it is
 * told once, and tried again.
 *
 * Invariant: a file system that hangs keeps one of this process' few threads for file calls, whatever lies there: no call to it can be
 * ended. So one file is read at a time, of all that are renewed, and the others wait for it; who has waited too long says so.
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

/** Of reading the files again, until a line is written. The look goes on, and what it finds is used whenever it ends. */
const readLimitMs = 5_000;

/** Ends with the last look of this process. */
let lastLook: Promise<void> = Promise.resolve();
/** What is read now. */
let readNow = '';

export class RenewedFiles<T> {
  readonly #options: RenewedFilesOptions<T>;
  readonly #timer: NodeJS.Timeout;
  #bytes: readonly Buffer[];
  #made: T;
  #problem: string | undefined;
  /** A look has been asked for, and has not ended. */
  #looking = false;
  /** It is its turn. */
  #isReading = false;
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

  /** A look at the files; never throws. Not begun while one of before goes on. */
  async reload(): Promise<void> {
    if (this.#looking) return;
    this.#looking = true;
    const look = lastLook.then(() => this.#look());
    lastLook = look.catch(() => {});
    await within('renewed files', readLimitMs, () => look).catch(({ message }: Error) => {
      const why = this.#isReading ? message : `${message}: ${readNow} is still being read`;
      this.#tell(
        `${this.#isReading ? readNow : this.#options.files[0]!.path}: not read again (${why}); the one before stays in use`,
      );
    });
  }

  /** Ends with its calls, which may be never; never throws. */
  async #look(): Promise<void> {
    const { files, make } = this.#options;
    this.#isReading = true;
    try {
      const fresh: Buffer[] = [];
      for (const [at, file] of files.entries()) {
        if (this.#isClosed) return;
        fresh.push(await readAgain(file, at));
      }
      if (this.#isClosed) return;
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
      this.#isReading = false;
      this.#looking = false;
    }
  }

  close(): void {
    this.#isClosed = true;
    clearInterval(this.#timer);
  }

  #tell(why: string | undefined): void {
    if (why === this.#problem || this.#isClosed) return;
    this.#problem = why;
    this.#options.onProblem(why, this);
  }
}

const whichOf = (files: readonly NamedFile[], error: unknown): NamedFile =>
  files[error instanceof FileProblem ? error.at : 0]!;

/** As at the start: a secret that others may read is none. @throws FileProblem */
async function readAgain({ path, isSecret }: NamedFile, at: number): Promise<Buffer> {
  readNow = path;
  try {
    if (isSecret && mayOthersRead(await stat(path))) throw new Error('others may read it; chmod o-rwx it');
    return await readFile(path);
  } catch (error) {
    throw new FileProblem(at, (error as Error).message, '');
  }
}

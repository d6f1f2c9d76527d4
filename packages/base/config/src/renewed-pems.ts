/**
 * Our certificate, its key and the authorities of the others, as the files hold them now: who begins a connection reads them then, who
 * listens is told when they are renewed. Both ends of a connection between members have them.
 */
import { type Pems, pemFilesOf, pemsIn } from './pem-files.ts';
import { RenewedFiles } from './renewed-files.ts';

export interface PemFiles {
  readonly caFile: string | null;
  readonly certFile: string | null;
  readonly keyFile: string | null;
  readonly reloadMs: number;
}

/** Why the files that lie there are not in use (one line); undefined: they are. */
export type OnProblem = (why: string | undefined) => void;

export class RenewedPems {
  readonly #files: RenewedFiles<Pems> | undefined;
  readonly #listeners = new Set<() => void>();

  /** `place`: of the files' keys in the configuration. @throws KvError CONFIG: a file that cannot be used */
  constructor({ caFile, certFile, keyFile, reloadMs }: PemFiles, onProblem: OnProblem, place: string) {
    const files = pemFilesOf(place, { certFile, keyFile, caFile });
    if (files.length === 0) return;
    this.#files = new RenewedFiles<Pems>({
      files,
      make: (bytes) => pemsIn(files, bytes),
      file: 'a readable PEM file',
      content: 'a certificate, its key and an authority (PEM)',
      ...{ reloadMs, onProblem },
    });
    this.#files.onRenewed = () => {
      for (const listener of this.#listeners) listener();
    };
  }

  get ca(): Buffer | undefined {
    return this.#files?.made.ca;
  }

  get cert(): Buffer | undefined {
    return this.#files?.made.cert;
  }

  get key(): Buffer | undefined {
    return this.#files?.made.key;
  }

  onRenewed(listener: () => void): void {
    this.#listeners.add(listener);
  }

  /** A look at the files; never throws. */
  async reload(): Promise<void> {
    await this.#files?.reload();
  }

  close(): void {
    this.#files?.close();
  }
}

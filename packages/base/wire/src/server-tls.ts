/**
 * TLS of a gRPC server whose files are renewed under it: they are read again every `reloadMs`, and a new pair serves the next
 * connection. Those that are open keep what they began with. A pair that does not go together (one of two files is new already) or
 * cannot be read changes nothing: it is told once, and tried again.
 */
import { readFileSync, statSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { createSecureContext, type SecureContextOptions } from 'node:tls';
import { ServerCredentials } from '@grpc/grpc-js';
import { KvError, within } from '@kvtier/errors';

/** PEM files. */
export interface ServerTlsFiles {
  /** Our certificate, and those between it and its authority. */
  readonly certFile: string;
  /** May be read by its owner and its group alone. */
  readonly keyFile: string;
  /** Authorities whose certificates let a client in; null: every client is let in. */
  readonly clientCaFile: string | null;
}

export interface TlsServerOptions {
  readonly reloadMs: number;
  /** Why the files that lie there are not in use (one line); undefined: they are. */
  readonly onProblem: (why: string | undefined) => void;
}

/** Of reading the files again. */
const readLimitMs = 5_000;

export class TlsServerCredentials extends ServerCredentials {
  readonly #files: ServerTlsFiles;
  readonly #onProblem: TlsServerOptions['onProblem'];
  readonly #timer: NodeJS.Timeout;
  #current: readonly Buffer[];
  #problem: string | undefined;
  #reading = false;

  /** @throws KvError CONFIG: a file that cannot be used */
  constructor(files: ServerTlsFiles, { reloadMs, onProblem }: TlsServerOptions) {
    const current = namesOf(files).map((file) => readNow(file, file === files.keyFile));
    const isClosed = files.clientCaFile !== null;
    try {
      super({ requestCert: isClosed, rejectUnauthorized: isClosed }, contextOf(current));
    } catch (error) {
      throw new KvError(
        'CONFIG',
        `${files.certFile}: ${(error as Error).message}; name a certificate and its key (PEM)`,
      );
    }
    this.#files = files;
    this.#onProblem = onProblem;
    this.#current = current;
    this.#timer = setInterval(() => void this.reload(), reloadMs);
    this.#timer.unref();
  }

  override _equals(other: ServerCredentials): boolean {
    return other === this;
  }

  /** A look at the files; never throws. */
  async reload(): Promise<void> {
    if (this.#reading) return;
    this.#reading = true;
    try {
      const names = namesOf(this.#files);
      const fresh = await within('TLS files', readLimitMs, (signal) =>
        Promise.all(names.map((file) => readFile(file, { signal }))),
      );
      if (fresh.some((bytes, at) => !bytes.equals(this.#current[at]!))) {
        this.updateSecureContextOptions(contextOf(fresh));
        this.#current = fresh;
      }
      this.#tell(undefined);
    } catch (error) {
      this.#tell(`${this.#files.certFile}: not read again (${(error as Error).message}); the one before stays in use`);
    } finally {
      this.#reading = false;
    }
  }

  close(): void {
    clearInterval(this.#timer);
  }

  #tell(why: string | undefined): void {
    if (why === this.#problem) return;
    this.#problem = why;
    this.#onProblem(why);
  }
}

const namesOf = ({ certFile, keyFile, clientCaFile }: ServerTlsFiles): string[] => [
  certFile,
  keyFile,
  ...(clientCaFile === null ? [] : [clientCaFile]),
];

/** @throws what OpenSSL says of a pair that does not go together */
function contextOf([cert, key, ca]: readonly Buffer[]): SecureContextOptions {
  const options: SecureContextOptions = { cert, key, minVersion: 'TLSv1.2', ...(ca === undefined ? {} : { ca }) };
  createSecureContext(options);
  return options;
}

function readNow(file: string, isSecret: boolean): Buffer {
  try {
    if (isSecret && (statSync(file).mode & 0o007) !== 0) throw new Error('others may read it; chmod o-rwx it');
    return readFileSync(file);
  } catch (error) {
    throw new KvError('CONFIG', `${file}: cannot be used (${(error as Error).message}); name a readable PEM file`);
  }
}

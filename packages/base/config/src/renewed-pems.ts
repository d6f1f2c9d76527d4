/**
 * Our certificate, its key and the authorities of the others, as the files hold them now: who begins a connection reads them then, who
 * listens is told when they are renewed. Both ends of a connection between members have them.
 */
import { createSecureContext } from 'node:tls';
import { RenewedFiles } from './renewed-files.ts';

export interface PemFiles {
  readonly caFile: string | null;
  readonly certFile: string | null;
  readonly keyFile: string | null;
  readonly reloadMs: number;
}

/** Why the files that lie there are not in use (one line); undefined: they are. */
export type OnProblem = (why: string | undefined) => void;

interface Pems {
  readonly ca: Buffer | undefined;
  readonly cert: Buffer | undefined;
  readonly key: Buffer | undefined;
}
const none: Pems = { ca: undefined, cert: undefined, key: undefined };

export class RenewedPems implements Pems {
  readonly #files: RenewedFiles<Pems> | undefined;
  readonly #listeners = new Set<() => void>();

  /** @throws KvError CONFIG: a file that cannot be used */
  constructor({ caFile, certFile, keyFile, reloadMs }: PemFiles, onProblem: OnProblem) {
    const named = [
      ...(caFile === null ? [] : [{ name: 'ca', path: caFile, isSecret: false }]),
      ...(certFile === null ? [] : [{ name: 'cert', path: certFile, isSecret: false }]),
      ...(keyFile === null ? [] : [{ name: 'key', path: keyFile, isSecret: true }]),
    ];
    if (named.length === 0) return;
    this.#files = new RenewedFiles<Pems>({
      files: named,
      make: (bytes) => checked({ ...none, ...Object.fromEntries(named.map(({ name }, at) => [name, bytes[at]!])) }),
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

/** @throws what OpenSSL says of files that do not go together, as while one of them is new already */
function checked(pems: Pems): Pems {
  createSecureContext(pems);
  return pems;
}

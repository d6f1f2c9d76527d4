/**
 * The keys of a file, one a line, one of which a request bears. The file is read again when it changes; "#" begins a remark.
 *
 * Invariant: how long a look takes says nothing of any key: it is for the key's digest, under a secret that this process made up, and
 * whoever guesses keys cannot guess digests.
 */
import { createHmac, randomBytes } from 'node:crypto';
import { RenewedFiles } from '@kvtier/config/files';

export interface ApiKeysOptions {
  /** The configuration's, that names the file. */
  readonly key?: string;
  readonly reloadMs?: number;
  /** Why the keys that lie there are not in use (one line); undefined: they are. */
  readonly onProblem: (why: string | undefined) => void;
}

const maxKeys = 65_536;

export class ApiKeys {
  readonly #secret = randomBytes(32);
  readonly #files: RenewedFiles<ReadonlySet<string>>;

  /** @throws KvError CONFIG: a file that cannot be used */
  constructor(path: string, { key, reloadMs = 10_000, onProblem }: ApiKeysOptions) {
    this.#files = new RenewedFiles<ReadonlySet<string>>({
      files: [{ path, isSecret: true, ...(key !== undefined && { key }) }],
      make: ([text]) => new Set(keysOf(text!.toString('utf8')).map((key) => this.#digestOf(key))),
      file: 'a readable file of keys, one a line',
      content: 'a file of keys, one a line',
      reloadMs,
      onProblem,
    });
  }

  has(key: string): boolean {
    return this.#files.made.has(this.#digestOf(key));
  }

  /** A look at the file; never throws. */
  reload(): Promise<void> {
    return this.#files.reload();
  }

  close(): void {
    this.#files.close();
  }

  #digestOf(key: string): string {
    return createHmac('sha256', this.#secret).update(key).digest('base64');
  }
}

/** @throws Error: a line that is no key, or none is */
function keysOf(text: string): string[] {
  const keys: string[] = [];
  for (const [at, line] of text.split('\n').entries()) {
    const key = line.trim();
    if (key === '' || key.startsWith('#')) continue;
    if (!/^[\x21-\x7e]{16,512}$/.test(key))
      throw new Error(`line ${at + 1} is no key: 16 to 512 printable characters without a space`);
    keys.push(key);
  }
  if (keys.length === 0 || keys.length > maxKeys) throw new Error(`holds ${keys.length} keys, not 1 to ${maxKeys}`);
  return keys;
}

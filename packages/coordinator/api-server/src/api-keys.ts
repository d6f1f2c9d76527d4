/**
 * The keys of a file, one a line, one of which a request bears. The file is read again when it changes; "#" begins a remark.
 *
 * Invariants: what is in use is one file's keys, all of them: a new one's take their place when they are ready, and until then they are
 * made ready a slice at a time, so that nothing waits for them. How long a look takes says nothing of any key: it is for the key's digest,
 * under a secret that this process made up, and whoever guesses keys cannot guess digests.
 */
import { createHmac, randomBytes } from 'node:crypto';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { RenewedFiles } from '@kvtier/config/files';

export interface ApiKeysOptions {
  /** The configuration's, that names the file. */
  readonly key?: string;
  readonly reloadMs?: number;
  /** Why the keys that lie there are not in use (one line); undefined: they are. */
  readonly onProblem: (why: string | undefined) => void;
}

const maxKeys = 65_536;
/** Digests made in one turn: some milliseconds. */
const sliceKeys = 1024;

export class ApiKeys {
  readonly #secret = randomBytes(32);
  readonly #files: RenewedFiles<readonly string[]>;
  /** Of the keys in use. */
  #digests: ReadonlySet<string>;
  /** The last file's are being made ready. */
  #renewing: Promise<void> | undefined;

  /** @throws KvError CONFIG: a file that cannot be used */
  constructor(path: string, { key, reloadMs = 10_000, onProblem }: ApiKeysOptions) {
    this.#files = new RenewedFiles<readonly string[]>({
      files: [{ path, isSecret: true, ...(key !== undefined && { key }) }],
      make: ([text]) => keysOf(text!.toString('utf8')),
      file: 'a readable file of keys, one a line',
      content: 'a file of keys, one a line',
      reloadMs,
      onProblem,
    });
    this.#digests = new Set(this.#files.made.map((key) => this.#digestOf(key)));
    this.#files.onRenewed = (keys) => {
      this.#renewing = this.#renew(keys);
    };
  }

  has(key: string): boolean {
    return this.#digests.has(this.#digestOf(key));
  }

  /** A look at the file; never throws. */
  async reload(): Promise<void> {
    await this.#files.reload();
    await this.#renewing;
  }

  close(): void {
    this.#files.close();
  }

  async #renew(keys: readonly string[]): Promise<void> {
    const digests = new Set<string>();
    for (let at = 0; at < keys.length; at += sliceKeys) {
      for (const key of keys.slice(at, at + sliceKeys)) digests.add(this.#digestOf(key));
      await nextTurn();
      if (this.#files.made !== keys) return; // there is a newer file
    }
    this.#digests = digests;
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

/**
 * How coordinator and workers know each other beyond loopback: TLS, and a certificate or a token of who asks. On Unix sockets and on
 * loopback nothing of this is needed, and of openai workers nothing where the network is said to be trusted.
 */
import { KvError } from '@kvtier/errors';
import * as z from 'zod';
import { milliseconds } from './listener.ts';
import { RenewedFiles } from './renewed-files.ts';
import { type OnProblem, RenewedPems } from './renewed-pems.ts';

const file = z.string().min(1);

/** The engine worker's end. PEM files; clients whose certificate is not of `clientCaFile` are not let in. */
export const workerTlsSchema = z.strictObject({
  certFile: file,
  keyFile: file,
  clientCaFile: file,
  /** Renewed files are looked for so often. */
  reloadMs: milliseconds.default(10_000),
});
export type WorkerTlsConfig = z.infer<typeof workerTlsSchema>;

/** The coordinator's end, for all workers that it reaches beyond loopback. */
export const workerAccessSchema = z.strictObject({
  /** Authority of the workers' certificates (PEM); null: those that the system knows, for openai workers alone. */
  caFile: file.nullable().default(null),
  /** Our certificate and its key (PEM); kvtier workers ask for it. */
  certFile: file.nullable().default(null),
  keyFile: file.nullable().default(null),
  /** The name in the workers' certificates; null: the host of each address. */
  serverName: z.string().min(1).max(253).nullable().default(null),
  /** File with the bearer token that openai workers ask for. */
  tokenFile: file.nullable().default(null),
  /** openai workers beyond loopback are reached in plain text, too, and without proving who we are: usual pods of vLLM have no TLS. */
  trustedNetwork: z.boolean().default(false),
  /** Pods that are reached in plain text beyond loopback are shown the token, too; false: only https and loopback carry it. */
  tokenInClear: z.boolean().default(false),
  /** Renewed files are looked for so often; what is new serves the next connection or request. */
  reloadMs: milliseconds.default(10_000),
});
export type WorkerAccessConfig = z.infer<typeof workerAccessSchema>;

/** What `Fleet` takes as `access`: as the files hold it now. */
export class WorkerAccess {
  readonly serverName: string | undefined;
  readonly trustedNetwork: boolean;
  readonly tokenInClear: boolean;
  readonly #pems: RenewedPems;
  readonly #token: RenewedFiles<string> | undefined;

  /** @throws KvError CONFIG: a file that cannot be used, a certificate without its key, no token */
  constructor(config: WorkerAccessConfig, onProblem: OnProblem) {
    const { certFile, keyFile, serverName, tokenFile, trustedNetwork, tokenInClear, reloadMs } = config;
    if ((certFile === null) !== (keyFile === null))
      throw new KvError('CONFIG', 'access: a certificate and its key go together; give certFile and keyFile');
    this.serverName = serverName ?? undefined;
    this.trustedNetwork = trustedNetwork;
    this.tokenInClear = tokenInClear;
    if (tokenFile !== null)
      this.#token = new RenewedFiles({
        files: [{ key: 'access.tokenFile', path: tokenFile, isSecret: true }],
        make: ([text]) => tokenIn(text!.toString('utf8')),
        file: 'a readable file',
        content: 'one line of printable characters',
        ...{ reloadMs, onProblem },
      });
    this.#pems = new RenewedPems(config, onProblem, 'access');
  }

  get ca(): Buffer | undefined {
    return this.#pems.ca;
  }

  get cert(): Buffer | undefined {
    return this.#pems.cert;
  }

  get key(): Buffer | undefined {
    return this.#pems.key;
  }

  get token(): string | undefined {
    return this.#token?.made;
  }

  /** A look at the files; never throws. */
  async reload(): Promise<void> {
    await Promise.all([this.#pems.reload(), this.#token?.reload()]);
  }

  close(): void {
    this.#pems.close();
    this.#token?.close();
  }
}

function tokenIn(text: string): string {
  const token = text.trim();
  if (!/^[\x21-\x7e]{1,4096}$/.test(token)) throw new Error('is no bearer token');
  return token;
}

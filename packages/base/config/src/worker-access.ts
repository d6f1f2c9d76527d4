/**
 * How coordinator and workers know each other beyond loopback: TLS, and a certificate or a token of who asks. On Unix sockets and on
 * loopback nothing of this is needed, and of openai workers nothing where the network is said to be trusted.
 */
import { KvError } from '@kvtier/errors';
import { z } from 'zod';
import { readPem } from './read-pem.ts';

const file = z.string().min(1);

/** The engine worker's end. PEM files; clients whose certificate is not of `clientCaFile` are not let in. */
export const workerTlsSchema = z.strictObject({ certFile: file, keyFile: file, clientCaFile: file });
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
});
export type WorkerAccessConfig = z.infer<typeof workerAccessSchema>;

/** What `Fleet` takes as `access`. */
export interface WorkerAccess {
  readonly ca: Buffer | undefined;
  readonly cert: Buffer | undefined;
  readonly key: Buffer | undefined;
  readonly serverName: string | undefined;
  readonly token: string | undefined;
  readonly trustedNetwork: boolean;
}

/** @throws KvError CONFIG: a file that cannot be used, a certificate without its key, no token */
export function readWorkerAccess(config: WorkerAccessConfig): WorkerAccess {
  const { caFile, certFile, keyFile, serverName, tokenFile, trustedNetwork } = config;
  if ((certFile === null) !== (keyFile === null))
    throw new KvError('CONFIG', 'worker access: a certificate and its key go together; give certFile and keyFile');
  const token = tokenFile === null ? undefined : readPem(tokenFile, true).toString('utf8').trim();
  if (token !== undefined && !/^[\x21-\x7e]{1,4096}$/.test(token))
    throw new KvError('CONFIG', `${tokenFile}: is no bearer token; write one line of printable characters`);
  return {
    ca: caFile === null ? undefined : readPem(caFile, false),
    cert: certFile === null ? undefined : readPem(certFile, false),
    key: keyFile === null ? undefined : readPem(keyFile, true),
    serverName: serverName ?? undefined,
    token,
    trustedNetwork,
  };
}

/** The engine worker's files. @throws KvError CONFIG */
export const readWorkerTls = ({ certFile, keyFile, clientCaFile }: WorkerTlsConfig) => ({
  ca: readPem(clientCaFile, false),
  cert: readPem(certFile, false),
  key: readPem(keyFile, true),
});

/**
 * TLS of a server whose files are renewed under it: a new pair serves the next connection, those that are open keep what they began with.
 * For gRPC: `TlsServerCredentials`; for HTTP: `https.createServer`, `clientsOf` and `setSecureContext`.
 */
import type { SecureContextOptions } from 'node:tls';
import { RenewedFiles } from '@kvtier/config/files';
import { pemFilesOf, pemsIn } from '@kvtier/config/pems';

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
  /** Of the files' keys in the configuration: "tls". */
  readonly place: string;
  readonly reloadMs: number;
  /** Why the files that lie there are not in use (one line); undefined: they are. */
  readonly onProblem: (why: string | undefined) => void;
}

/** @throws KvError CONFIG: a file that cannot be used */
export function renewedTls(
  { certFile, keyFile, clientCaFile }: ServerTlsFiles,
  { place, reloadMs, onProblem }: TlsServerOptions,
): RenewedFiles<SecureContextOptions> {
  const files = pemFilesOf(place, { certFile, keyFile, clientCaFile });
  return new RenewedFiles<SecureContextOptions>({
    files,
    make: (bytes) => ({ ...pemsIn(files, bytes), minVersion: 'TLSv1.2' }),
    file: 'a readable PEM file',
    content: 'a certificate and its key (PEM)',
    ...{ reloadMs, onProblem },
  });
}

/** Whether a client has to show a certificate: what Node's TLS servers take beside the context. */
export const clientsOf = ({ clientCaFile }: ServerTlsFiles) => {
  const isClosed = clientCaFile !== null;
  return { requestCert: isClosed, rejectUnauthorized: isClosed };
};

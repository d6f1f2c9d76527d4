/**
 * TLS of a server whose files are renewed under it: a new pair serves the next connection, those that are open keep what they began with.
 * For gRPC: `TlsServerCredentials`; for HTTP: `https.createServer`, `clientsOf` and `setSecureContext`.
 */
import { createSecureContext, type SecureContextOptions } from 'node:tls';
import { RenewedFiles } from '@kvtier/config/files';

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

/** @throws KvError CONFIG: a file that cannot be used */
export const renewedTls = (files: ServerTlsFiles, options: TlsServerOptions): RenewedFiles<SecureContextOptions> =>
  new RenewedFiles({
    files: [
      { path: files.certFile, isSecret: false },
      { path: files.keyFile, isSecret: true },
      ...(files.clientCaFile === null ? [] : [{ path: files.clientCaFile, isSecret: false }]),
    ],
    make: contextOf,
    file: 'a readable PEM file',
    content: 'a certificate and its key (PEM)',
    ...options,
  });

/** Whether a client has to show a certificate: what Node's TLS servers take beside the context. */
export const clientsOf = ({ clientCaFile }: ServerTlsFiles) => {
  const isClosed = clientCaFile !== null;
  return { requestCert: isClosed, rejectUnauthorized: isClosed };
};

/** @throws what OpenSSL says of a pair that does not go together */
function contextOf([cert, key, ca]: readonly Buffer[]): SecureContextOptions {
  const options: SecureContextOptions = { cert, key, minVersion: 'TLSv1.2', ...(ca === undefined ? {} : { ca }) };
  createSecureContext(options);
  return options;
}

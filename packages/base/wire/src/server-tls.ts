/** TLS of a gRPC server, with files that are renewed under it (tls.ts). */
import type { SecureContextOptions } from 'node:tls';
import { ServerCredentials } from '@grpc/grpc-js';
import type { RenewedFiles } from '@kvtier/config/files';
import { clientsOf, renewedTls, type ServerTlsFiles, type TlsServerOptions } from './tls.ts';

export class TlsServerCredentials extends ServerCredentials {
  readonly #renewed: RenewedFiles<SecureContextOptions>;

  /** @throws KvError CONFIG: a file that cannot be used */
  constructor(files: ServerTlsFiles, options: TlsServerOptions) {
    const renewed = renewedTls(files, options);
    super(clientsOf(files), renewed.made);
    this.#renewed = renewed;
    renewed.onRenewed = (context) => this.updateSecureContextOptions(context);
  }

  override _equals(other: ServerCredentials): boolean {
    return other === this;
  }

  /** A look at the files; never throws. */
  reload(): Promise<void> {
    return this.#renewed.reload();
  }

  close(): void {
    this.#renewed.close();
  }
}

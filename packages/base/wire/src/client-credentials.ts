/**
 * What a gRPC client needs to reach a server: on a Unix socket the certainty whose process serves it, on loopback nothing, elsewhere
 * TLS with a certificate at both ends.
 */
import type { Socket } from 'node:net';
import { CallCredentials, ChannelCredentials, credentials, type experimental } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import { checkServer, checkSocketFolder } from './private-socket.ts';

/** PEM: our certificate with its key, and the authority that the other end's certificate must be of. */
export interface TlsFiles {
  readonly ca: Buffer;
  readonly cert: Buffer;
  readonly key: Buffer;
  /** The name in the server's certificate; undefined: its host's. */
  readonly serverName?: string | undefined;
}

/** "127.0.0.1:80", "localhost:80", "[::1]:80", or a Unix socket: nobody else's machine sees what is sent there. */
export const isLocal = (address: string): boolean =>
  address.startsWith('unix:') || /^(127\.\d+\.\d+\.\d+|localhost|\[::1\]|::1)(:\d+)?$/.test(address);

/**
 * `address`: "unix:/path" or "host:port". On a Unix socket a server of another user is never sent a byte: its calls fail as
 * if nobody was there, and `onRefused` learns why. @throws KvError CONFIG: beyond loopback, and no `tls`
 */
export function clientCredentials(
  address: string,
  onRefused: (why: KvError) => void = () => {},
  tls?: TlsFiles,
): ChannelCredentials {
  if (address.startsWith('unix:')) return new OwnServerCredentials(address.slice('unix:'.length), onRefused);
  if (tls) return credentials.createSsl(tls.ca, tls.key, tls.cert);
  if (isLocal(address)) return credentials.createInsecure();
  throw new KvError('CONFIG', `${address}: is beyond loopback; configure TLS with a certificate of ours for it`);
}

class OwnServerCredentials extends ChannelCredentials {
  readonly #path: string;
  readonly #onRefused: (why: KvError) => void;

  constructor(path: string, onRefused: (why: KvError) => void) {
    super();
    this.#path = path;
    this.#onRefused = onRefused;
  }

  override _isSecure(): boolean {
    return false;
  }

  override _equals(other: ChannelCredentials): boolean {
    return other === this;
  }

  override _createSecureConnector(): experimental.SecureConnector {
    return {
      connect: async (socket: Socket) => {
        try {
          checkSocketFolder(this.#path);
          checkServer(socket, this.#path);
        } catch (error) {
          this.#onRefused(KvError.from(error));
          throw error;
        }
        return { socket, secure: false };
      },
      waitForReady: async () => {},
      getCallCredentials: () => CallCredentials.createEmpty(),
      destroy: () => {},
    };
  }
}

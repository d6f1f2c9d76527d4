/** What a gRPC client needs to reach a server: plain text, and on a Unix socket the certainty whose process serves it. */
import type { Socket } from 'node:net';
import { CallCredentials, ChannelCredentials, credentials, type experimental } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import { checkServer, checkSocketFolder } from './private-socket.ts';

/**
 * `address`: "unix:/path" or "host:port" (loopback only, so far). A server of another user is never sent a byte: its calls fail as
 * if nobody was there, and `onRefused` learns why.
 */
export const clientCredentials = (address: string, onRefused: (why: KvError) => void = () => {}): ChannelCredentials =>
  address.startsWith('unix:')
    ? new OwnServerCredentials(address.slice('unix:'.length), onRefused)
    : credentials.createInsecure();

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

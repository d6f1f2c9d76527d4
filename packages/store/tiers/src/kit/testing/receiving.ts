/**
 * What sockets that are given their buffers (`onread` of net.connect) receive into. A test sees so that bytes go from the socket into the
 * arena itself, and are not received elsewhere and copied: where they lie in the end tells nothing of that.
 */
import { subscribe, unsubscribe } from 'node:diagnostics_channel';
import type { Socket } from 'node:net';

const channel = 'net.client.socket';
type Generates = Record<symbol, () => Uint8Array>;

/** From now on until `end`: each buffer that a socket of this process asked for, in order. */
export function watchReceiving(): { readonly buffers: readonly Uint8Array[]; end(): void } {
  const buffers: Uint8Array[] = [];
  const onSocket = (message: unknown): void => {
    const { socket } = message as { socket: Socket };
    const symbol = Object.getOwnPropertySymbols(socket).find(({ description }) => description === 'kBufferGen');
    const sockets = socket as unknown as Generates;
    if (symbol === undefined || typeof sockets[symbol] !== 'function') return; // it has buffers of its own
    const next = sockets[symbol];
    sockets[symbol] = () => {
      const buffer = next();
      buffers.push(buffer);
      return buffer;
    };
  };
  subscribe(channel, onSocket);
  return { buffers, end: () => void unsubscribe(channel, onSocket) };
}

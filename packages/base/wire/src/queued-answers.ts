/**
 * Answers that wait behind others on their connection (a client sent its next request before it had the answer to the one before). Node
 * gives such an answer a socket when it is its turn, and tells it nothing of a connection that ends before: whoever waits for its 'close'
 * would wait for ever.
 *
 * Invariants: every answer closes with its connection at the latest; a connection has few requests in progress, however many it sends.
 */
import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import type { Socket } from 'node:net';

/** Of one connection: a share of what the server takes at once, within these. */
const [leastOpen, mostOpen, share] = [8, 64, 4];

/** Of a server that takes so many requests at once. Who has more in progress on one connection than is its share is cut off. */
export function closeQueuedAnswers(server: Server, requests: number): void {
  const most = Math.max(leastOpen, Math.min(mostOpen, requests / share));
  const connections = new WeakMap<Socket, Set<ServerResponse>>();
  const openOf = (socket: Socket): Set<ServerResponse> => {
    const known = connections.get(socket);
    if (known !== undefined) return known;
    const open = new Set<ServerResponse>();
    connections.set(socket, open);
    socket.once('close', () => closeAll(open));
    return open;
  };
  // Before whoever answers: its connection is cut when it looks.
  server.prependListener('request', ({ socket }: IncomingMessage, response: ServerResponse) => {
    const open = openOf(socket);
    open.add(response);
    response.once('close', () => open.delete(response));
    if (open.size > most) socket.destroy();
  });
}

function closeAll(open: ReadonlySet<ServerResponse>): void {
  for (const response of [...open]) {
    // Node closes the one whose turn it is, and one that is whole.
    if (response.socket !== null || response.writableFinished) continue;
    response.destroy();
    response.emit('close');
  }
}

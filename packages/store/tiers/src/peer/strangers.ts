/**
 * Connections that have not proved themselves yet. Invariant: there are few of them and each for a short time; one more takes the
 * place of the oldest, so that who comes to hold connections keeps nobody out: a node needs two round trips, and is no stranger then.
 */
import type { Socket } from 'node:net';

const limitMs = 3000;

/** The same of a TLS connection and of what it runs over. */
const nameOf = ({ remoteAddress, remotePort }: Socket): string => `${remoteAddress} ${remotePort}`;

export class Strangers {
  readonly #max: number;
  /** By name, the oldest first. */
  readonly #known = new Map<string, { readonly socket: Socket; readonly limit: NodeJS.Timeout }>();

  constructor(max: number) {
    this.#max = max;
  }

  add(socket: Socket): void {
    const name = nameOf(socket);
    const [oldest] = this.#known;
    if (oldest !== undefined && this.#known.size >= this.#max) {
      this.#forget(oldest[0]);
      oldest[1].socket.destroy();
    }
    const limit = setTimeout(() => socket.destroy(), limitMs).unref();
    this.#known.set(name, { socket, limit });
    socket.once('close', () => {
      if (this.#known.get(name)?.socket === socket) this.#forget(name);
    });
  }

  /** It has proved itself. */
  remove(socket: Socket): void {
    this.#forget(nameOf(socket));
  }

  end(): void {
    for (const { socket } of this.#known.values()) socket.destroy();
  }

  #forget(name: string): void {
    clearTimeout(this.#known.get(name)?.limit);
    this.#known.delete(name);
  }
}

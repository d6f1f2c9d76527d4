/**
 * Where a publisher is bound. A socket takes another CURVE key only by being bound anew: then who is connected with the one before is
 * cut off, at the latest with what is published next, and comes back when it has this one.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import type { Socket } from 'zeromq';
import { applyCurveServer, type CurveServer } from './security.ts';
import { uninterrupted } from './uninterrupted.ts';

export interface BoundSocket {
  readonly socket: Socket;
  /** Its port resolved. */
  readonly endpoint: string;
}

const firstPauseMs = 10;
const maxPauseMs = 1_000;
/** ZeroMQ's own thread lets go who is connected. Bound again before that, a busy machine now and then kept one that heard nothing more. */
const letGoMs = 100;

export class BoundSockets {
  readonly #sockets: readonly BoundSocket[];
  readonly #curve: CurveServer;
  readonly #tell: (error: KvError) => void;
  readonly #abort = new AbortController();
  #binding: Promise<void> = Promise.resolve();

  /** `tell`: somebody else has taken the place; it is tried again until it is free. */
  constructor(sockets: readonly BoundSocket[], curve: CurveServer, tell: (error: KvError) => void) {
    this.#sockets = sockets;
    this.#curve = curve;
    this.#tell = tell;
  }

  /** With the key of now. Fulfilled when all are bound, or closed; one after another. */
  renew(): Promise<void> {
    this.#binding = this.#binding.then(async () => {
      for (const bound of this.#sockets) await this.#renew(bound);
    });
    return this.#binding;
  }

  /** Fulfilled when no renewal is under way. */
  settled(): Promise<void> {
    return this.#binding;
  }

  /** Before the sockets are closed. */
  async close(): Promise<void> {
    this.#abort.abort();
    await this.#binding;
  }

  async #renew({ socket, endpoint }: BoundSocket): Promise<void> {
    const { signal } = this.#abort;
    let isTold = false;
    for (let pauseMs = firstPauseMs; !signal.aborted; pauseMs = Math.min(2 * pauseMs, maxPauseMs)) {
      try {
        await socket.unbind(endpoint).catch(() => undefined); // not bound: the try before failed
        await sleep(letGoMs, undefined, { signal }).catch(() => undefined);
        if (signal.aborted) return;
        await bind(socket, endpoint, this.#curve);
        return;
      } catch (error) {
        if (!isTold) this.#tell(KvError.from(error));
        isTold = true;
      }
      await sleep(pauseMs, undefined, { signal }).catch(() => undefined);
    }
  }
}

/** @throws KvError LOCKED, IO */
export async function bind(socket: Socket, endpoint: string, curve: CurveServer | null): Promise<void> {
  applyCurveServer(socket, curve);
  socket.ipv6 = endpoint.includes('[');
  try {
    await uninterrupted(() => socket.bind(endpoint));
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (code === 'EADDRINUSE') throw new KvError('LOCKED', `${endpoint}: in use by another process; choose another`);
    throw new KvError('IO', `${endpoint}: cannot be bound (${message}); name an address of this machine`);
  }
}

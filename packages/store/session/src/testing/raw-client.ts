/** A client of the session link that does exactly what a test says, right or wrong. */
import net from 'node:net';
import { type Attach, ClientFrame, FrameReader, ServerFrame, writeFrame } from '@kvtier/wire';
import type { ClientBody, ServerBody } from '../requests.ts';

export interface Answer {
  readonly id: bigint;
  readonly bootEpoch: bigint;
  readonly body: ServerBody;
}

type ValueOf<C extends ServerBody['$case']> = Extract<ServerBody, { readonly $case: C }>['value'];

export class RawClient {
  readonly socket: net.Socket;
  readonly answers: Answer[] = [];
  /** Resolves when the connection has ended, whoever ended it. */
  readonly ended: Promise<void>;
  #nextId = 1n;
  #wake: () => void = () => {};

  private constructor(socket: net.Socket) {
    this.socket = socket;
    const reader = new FrameReader((message) => {
      const { id, bootEpoch, body } = ServerFrame.decode(message);
      this.answers.push({ id, bootEpoch, body: body! });
      this.#wake();
    });
    socket.on('data', (chunk) => reader.push(chunk));
    socket.on('error', () => {}); // EPIPE and the like: `ended` tells
    this.ended = new Promise((resolve) => {
      socket.once('close', () => {
        this.#wake();
        resolve();
      });
    });
  }

  static async connect(socketPath: string): Promise<RawClient> {
    const socket = net.connect(socketPath);
    await new Promise<void>((resolve, reject) => {
      socket.once('connect', resolve);
      socket.once('error', reject);
    });
    return new RawClient(socket);
  }

  send(body: ClientBody): bigint {
    const id = this.#nextId++;
    writeFrame(this.socket, ClientFrame.encode({ id, body }).finish());
    return id;
  }

  /** The next answer to `id` that satisfies `isIt`; fails when the connection ends first. */
  async answer<C extends ServerBody['$case']>(id: bigint, $case: C): Promise<ValueOf<C>> {
    while (true) {
      const index = this.answers.findIndex(
        (answer) => answer.id === id && (answer.body.$case === $case || answer.body.$case === 'failure'),
      );
      if (index !== -1) {
        const { body } = this.answers.splice(index, 1)[0]!;
        if (body.$case === $case) return body.value as ValueOf<C>;
        throw Object.assign(new Error('failure'), (body as Extract<ServerBody, { $case: 'failure' }>).value);
      }
      if (this.socket.destroyed) throw new Error('the connection ended');
      await new Promise<void>((resolve) => {
        this.#wake = resolve;
      });
    }
  }

  async call<C extends ServerBody['$case']>(body: ClientBody, $case: C): Promise<ValueOf<C>> {
    return this.answer(this.send(body), $case);
  }

  attach(changes: Partial<Attach> = {}) {
    return this.call({ $case: 'attach', value: attachOf(changes) }, 'attached');
  }

  async end(): Promise<void> {
    this.socket.destroy();
    await this.ended;
  }
}

export function attachOf(changes: Partial<Attach> = {}): Attach {
  return {
    protocol: 1,
    namespace: Buffer.alloc(32, 7),
    payloadBytes: 1n,
    blockTokens: 16,
    hashBytes: 16,
    client: 'test',
    previousSession: Buffer.alloc(0),
    tenant: '',
    ttlSeconds: 0,
    ...changes,
  };
}

/** Packed 16-byte hashes named "x:0", "x:1", ... */
export function packed(name: string, count: number, first = 0): Buffer {
  const names = Array.from({ length: count }, (_, index) => `${name}:${first + index}`.padEnd(16, '.'));
  return Buffer.from(names.join(''), 'latin1');
}

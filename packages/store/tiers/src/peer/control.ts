/**
 * The control connection between two nodes: proof of identity, then messages. Apart from the data connections, so that it never
 * waits behind bulk.
 *
 *     client: hello ──▶  ◀── server: answer + proof     client: proof ──▶  ◀── server: welcome
 *
 * Both ends prove a key: under TLS one exported from the TLS session (RFC 5705), so that the proof holds for this channel only;
 * without, one made of a secret that both have: the server proves each of its own, the client takes the first of its own among them.
 * Invariants: no message is handled before its sender has proved itself; a node is sent only what it knows (`features.ts`); what waits
 * to be sent is bounded; what arrives is handled a little in each turn, all connections of one `Slices` taking turns.
 */
import { Buffer } from 'node:buffer';
import { createHash, createHmac, timingSafeEqual } from 'node:crypto';
import { connect, type Socket } from 'node:net';
import { type TLSSocket, connect as tlsConnect } from 'node:tls';
import { KvError } from '@kvtier/errors';
import type { Slices } from '../kit/slices.ts';
import { allFeatures, features, featuresIn, isKnown, nonceTelling } from './features.ts';
import { encode, type Message, PeerFrameReader, type Received } from './frames.ts';

/** How peers know each other. All nodes of a cluster have the same. */
export type PeerSecurity =
  /** Certificates of one authority, PEM; every node has its own and checks the other's. */
  | {
      readonly encryption: 'tls';
      readonly cert: Buffer;
      readonly key: Buffer;
      readonly ca: Buffer;
      /** They may be others from one connection to the next: told when that is so. */
      onRenewed?(listener: () => void): void;
    }
  /** Shared secrets, of which both need one, and bytes that anyone on the way can read: loopback, or a network that is trusted. */
  | {
      readonly encryption: 'none';
      /** They may be others from one connection to the next. The first is proved to older nodes, which know of one only. */
      readonly secrets: readonly Buffer[];
      readonly trustedNetwork?: boolean;
    };

export interface Proven {
  readonly control: Control;
  readonly dataKey: Buffer;
  readonly peerEpoch: bigint;
}

/** Unsent; who tells of much looks at `unsentBytes` first. */
export const maxBufferedBytes = 16 << 20;
/** Handled in one turn: some two thousand names. */
const turnBytes = 64 << 10;
/** Messages that may have come before anybody listens to them, or while none is handled: what two chunks of a socket hold. */
const maxWaiting = 32_768;
const handshakeMs = 5000;
export const sessionBytes = 16;

/** Messages over one socket. Ends once, and says why. */
export class Control {
  readonly socket: Socket;
  readonly #reader = new PeerFrameReader();
  readonly #onEnd: ((error: KvError) => void)[] = [];
  #onMessage: (message: Received) => void = () => {};
  readonly #slices: Slices;
  #waiting: Received[] = [];
  #listening = false;
  /** Of this turn. */
  #handledBytes = 0;
  #holds = 0;
  #known = 0;
  #error: KvError | undefined;

  constructor(socket: Socket, slices: Slices) {
    this.socket = socket;
    this.#slices = slices;
    socket.setNoDelay(true);
    socket.on('data', (bytes: Buffer) => this.#receive(bytes));
    socket.on('error', (error) => this.end(new KvError('DISCONNECTED', `peer: ${error.message}; see the peer's log`)));
    socket.on('close', () =>
      this.end(new KvError('DISCONNECTED', "peer: it ended the connection; see the peer's log")),
    );
  }

  get ended(): boolean {
    return this.#error !== undefined;
  }

  get isHeld(): boolean {
    return this.#holds > 0;
  }

  get unsentBytes(): number {
    return this.socket.writableLength;
  }

  /** Handle nothing more until `until` is fulfilled; the other end is made to wait. */
  hold(until: Promise<void>): void {
    this.#holds++;
    this.socket.pause();
    void until.then(() => {
      this.#holds--;
      if (this.#holds > 0 || this.ended) return;
      if (this.#listening) this.listen(this.#onMessage);
      if (this.#holds === 0) this.#slices.add(this.#resume);
    });
  }

  /** Messages go to `listener` from now on, those that have come already first. */
  listen(listener: (message: Received) => void): void {
    this.#onMessage = listener;
    this.#listening = true;
    const waiting = this.#waiting;
    this.#waiting = [];
    for (const message of waiting) this.#handle(message);
  }

  readonly #resume = (): boolean => {
    this.#handledBytes = 0;
    if (this.#holds === 0) this.socket.resume();
    return false;
  };

  /** Called once, at once when it has ended. */
  onEnd(listener: (error: KvError) => void): void {
    if (this.#error === undefined) this.#onEnd.push(listener);
    else listener(this.#error);
  }

  /** The other end knows these features. */
  knows(bits: number): void {
    this.#known = bits;
  }

  /** What the other end does not know is left out. */
  send(...messages: readonly Message[]): void {
    if (this.ended) return;
    this.socket.write(Buffer.concat(messages.filter((message) => isKnown(message, this.#known)).map(encode)));
    if (this.socket.writableLength <= maxBufferedBytes) return;
    this.end(new KvError('BUSY', 'peer: it does not read what is said to it; see whether that node hangs'));
  }

  /** The next message, during the handshake. */
  next(): Promise<Received> {
    return new Promise((resolve, reject) => {
      this.onEnd(reject);
      this.listen((message) => {
        this.#listening = false;
        this.#onMessage = () => {};
        resolve(message);
      });
    });
  }

  end(error: KvError): void {
    if (this.#error !== undefined) return;
    this.#error = error;
    this.#waiting = [];
    this.#slices.remove(this.#resume);
    this.socket.destroy();
    for (const listener of this.#onEnd.splice(0)) listener(error);
  }

  #receive(bytes: Buffer): void {
    this.#handledBytes += bytes.length;
    if (this.#handledBytes >= turnBytes) {
      this.socket.pause();
      this.#slices.add(this.#resume);
    }
    try {
      for (const message of this.#reader.push(bytes)) {
        if (this.ended) return;
        this.#handle(message);
      }
    } catch (error) {
      if (!(error instanceof KvError)) throw error;
      this.end(error);
    }
  }

  #handle(message: Received): void {
    if (this.ended) return; // by one before it, of those that waited
    if (this.#listening && this.#holds === 0) this.#onMessage(message);
    else if (this.#waiting.length < maxWaiting) this.#waiting.push(message);
    else this.end(new KvError('PROTOCOL', 'peer: it speaks out of turn; run nodes of one version'));
  }
}

const unproven = (): KvError =>
  new KvError(
    'PROTOCOL',
    'peer: it does not prove the secret; give all nodes the same secret, or certificates of one CA',
  );

function keysOf(socket: Socket, security: PeerSecurity): readonly Buffer[] {
  if (security.encryption === 'none')
    return security.secrets.map((secret) => createHash('sha256').update('kvtier peer 1').update(secret).digest());
  return [(socket as TLSSocket).exportKeyingMaterial(32, 'EXPORTER-kvtier-peer', Buffer.alloc(0))];
}

const mac = (key: Buffer, side: string, epochs: readonly bigint[], nonces: readonly Buffer[]): Buffer => {
  const hmac = createHmac('sha256', key).update(side);
  for (const epoch of epochs) hmac.update(Buffer.from(BigUint64Array.of(epoch).buffer));
  for (const nonce of nonces) hmac.update(nonce);
  return hmac.digest();
};

/** Ends `control` unless `work` is done in time; its error is the connection's. */
async function within<T>(control: Control, work: () => Promise<T>): Promise<T> {
  const limit = new KvError(
    'DEADLINE',
    'peer: no proof within 5 s; see whether that node is overloaded or no node at all',
  );
  const timer = setTimeout(() => control.end(limit), handshakeMs);
  try {
    return await work();
  } catch (error) {
    control.end(KvError.from(error, 'PROTOCOL'));
    throw KvError.from(error, 'PROTOCOL');
  } finally {
    clearTimeout(timer);
  }
}

/** Prove ourselves to the node at `host:port`. Rejects with a KvError; never hangs. */
export async function dial(
  host: string,
  port: number,
  security: PeerSecurity,
  epoch: bigint,
  slices: Slices,
  onSocket: (control: Control) => void,
): Promise<Proven & { readonly session: Buffer; readonly dataPort: number; readonly heartbeatMs: number }> {
  const tls = security.encryption === 'tls';
  const socket = tls
    ? tlsConnect({ host, port, cert: security.cert, key: security.key, ca: security.ca, minVersion: 'TLSv1.3' })
    : connect({ host, port });
  const control = new Control(socket, slices);
  onSocket(control);
  return within(control, async () => {
    await new Promise<void>((resolve, reject) => {
      socket.once(tls ? 'secureConnect' : 'connect', () => resolve());
      control.onEnd(reject);
    });
    const keys = keysOf(socket, security);
    const nonce = nonceTelling(allFeatures);
    control.send({ kind: 'hello', epoch, nonce });
    const answer = await control.next();
    if (answer.kind !== 'answer') throw unproven();
    const both = [nonce, answer.nonce];
    const epochs = [epoch, answer.epoch];
    const key = keys.find((own) => {
      const proof = mac(own, 'server', epochs, both);
      return answer.proofs.some((each) => timingSafeEqual(each, proof));
    });
    if (key === undefined) throw unproven();
    control.knows(featuresIn(answer.nonce));
    control.send({ kind: 'proof', proof: mac(key, 'client', epochs, both) });
    const welcome = await control.next();
    if (welcome.kind !== 'welcome') throw unproven();
    const { session, dataPort, heartbeatMs } = welcome;
    const dataKey = mac(key, 'data', epochs, both);
    return { control, session, dataPort, heartbeatMs, dataKey, peerEpoch: answer.epoch };
  });
}

/** Let the node at the other end of `socket` prove itself. Rejects with a KvError; never hangs. */
export async function greet(
  socket: Socket,
  security: PeerSecurity,
  epoch: bigint,
  slices: Slices,
  onSocket: (control: Control) => void,
): Promise<Proven> {
  const control = new Control(socket, slices);
  onSocket(control);
  return within(control, async () => {
    const hello = await control.next();
    if (hello.kind !== 'hello') throw unproven();
    const keys = keysOf(socket, security);
    const nonce = nonceTelling(allFeatures);
    const both = [hello.nonce, nonce];
    const epochs = [hello.epoch, epoch];
    const theirs = featuresIn(hello.nonce);
    const shown = (theirs & features.manyProofs) === 0 ? keys.slice(0, 1) : keys;
    control.send({ kind: 'answer', epoch, nonce, proofs: shown.map((own) => mac(own, 'server', epochs, both)) });
    const proof = await control.next();
    if (proof.kind !== 'proof') throw unproven();
    const key = keys.find((own) => timingSafeEqual(proof.proof, mac(own, 'client', epochs, both)));
    if (key === undefined) throw unproven();
    control.knows(theirs);
    return { control, dataKey: mac(key, 'data', epochs, both), peerEpoch: hello.epoch };
  });
}

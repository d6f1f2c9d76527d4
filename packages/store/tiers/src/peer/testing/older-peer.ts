/**
 * A node of the first version of the peer protocol, by its bytes and without anything of today's code: it knows the messages 1 to 9,
 * takes each at its one length, and ends the connection at any other.
 */
import { createHash, createHmac } from 'node:crypto';
import { readFileSync } from 'node:fs';
import type { Socket } from 'node:net';

const golden = (name: string): Buffer => readFileSync(new URL(`../../../golden/${name}.bin`, import.meta.url));
const epochBytes = Buffer.from('0807060504030201', 'hex');
/** Of its hello, and of its answer. */
const ownNonce = golden('peer-hello-older').subarray(25);

/** By kind: bytes of its body; null: any number of names. */
const lengths: Readonly<Record<number, number | null>> = {
  ...{ 1: 52, 2: 84, 3: 32, 4: 22, 5: null, 6: 0, 7: 0, 8: null, 9: 0 },
};

type Frame = { readonly kind: number; readonly body: Buffer };

export class OlderPeer {
  readonly #socket: Socket;
  readonly #key: Buffer;
  readonly #frames: Frame[] = [];
  #rest = Buffer.alloc(0);
  /** Why it ended the connection, as a node of that version does. */
  refused: string | undefined;
  ended = false;

  constructor(socket: Socket, secret: Buffer) {
    this.#socket = socket;
    this.#key = createHash('sha256').update('kvtier peer 1').update(secret).digest();
    socket.on('data', (bytes: Buffer) => this.#receive(bytes));
    socket.on('error', () => {});
    socket.on('close', () => {
      this.ended = true;
    });
  }

  /** What it was told since it proved itself. */
  get told(): readonly Frame[] {
    return this.#frames.filter(({ kind }) => kind > 4);
  }

  send(kind: number, body: Buffer = Buffer.alloc(0)): void {
    const head = Buffer.alloc(5);
    head.writeUInt32LE(body.length + 1, 0);
    head[4] = kind;
    this.#socket.write(Buffer.concat([head, body]));
  }

  /** The client's part: the golden hello, byte by byte. */
  async prove(): Promise<void> {
    this.#socket.write(golden('peer-hello-older'));
    const { body } = await this.#next(2);
    const both = { epochs: [epochBytes, body.subarray(12, 20)], nonces: [ownNonce, body.subarray(20, 52)] };
    if (!body.subarray(52).equals(this.#mac('server', both)))
      throw new Error('older peer: it does not prove the secret');
    this.send(3, this.#mac('client', both));
    await this.#next(4);
  }

  /** The server's part: the golden answer, with the proof that belongs to what came. */
  async welcome(dataPort: number): Promise<void> {
    const { body } = await this.#next(1);
    const both = { epochs: [body.subarray(12, 20), epochBytes], nonces: [body.subarray(20, 52), ownNonce] };
    const answer = golden('peer-answer-older').subarray(0, 57);
    this.#socket.write(Buffer.concat([answer, this.#mac('server', both)]));
    const proof = await this.#next(3);
    if (!proof.body.equals(this.#mac('client', both))) throw new Error('older peer: it does not prove the secret');
    const tail = Buffer.alloc(6);
    tail.writeUInt16LE(dataPort, 0);
    tail.writeUInt32LE(60_000, 2);
    this.send(4, Buffer.concat([Buffer.alloc(16, 7), tail]));
  }

  #mac(side: string, { epochs, nonces }: { epochs: readonly Buffer[]; nonces: readonly Buffer[] }): Buffer {
    const hmac = createHmac('sha256', this.#key).update(side);
    for (const part of [...epochs, ...nonces]) hmac.update(part);
    return hmac.digest();
  }

  async #next(kind: number): Promise<Frame> {
    const limitMs = performance.now() + 10_000;
    for (;;) {
      const found = this.#frames.find((frame) => frame.kind === kind);
      if (found !== undefined) return found;
      if (this.ended || performance.now() > limitMs) throw new Error(`older peer: message ${kind} did not come`);
      await new Promise((resolve) => setTimeout(resolve, 2));
    }
  }

  #receive(bytes: Buffer): void {
    this.#rest = Buffer.concat([this.#rest, bytes]);
    while (this.#rest.length >= 4 && this.#rest.length >= 4 + this.#rest.readUInt32LE(0)) {
      const length = this.#rest.readUInt32LE(0);
      const frame = { kind: this.#rest[4]!, body: this.#rest.subarray(5, 4 + length) };
      this.#rest = this.#rest.subarray(4 + length);
      const bytesKnown = lengths[frame.kind];
      if (bytesKnown === undefined || (bytesKnown !== null && bytesKnown !== frame.body.length)) {
        this.refused = `message ${frame.kind} of ${frame.body.length} bytes`;
        this.#socket.destroy();
        return;
      }
      this.#frames.push(frame);
    }
  }
}

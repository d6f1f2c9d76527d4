/**
 * One HTTP/1.1 connection whose bodies go straight between the socket and buffers of the caller: slots of the arena.
 * Received bytes land where they belong (`onread` with a buffer that moves on); sent ones are written out of the slots.
 *
 *     read ──▶ head buffer (4 KiB) ──▶ status, headers ──▶ targets, one after another ──▶ head buffer, idle again
 *
 * Invariant: when `send` has settled, this connection never touches the caller's buffers again. After success the socket reads
 * into the head buffer; in every other case it has been destroyed before. Node's own clients make a new buffer for each
 * piece of a body, which costs 2 to 4 times the CPU.
 */
import { Buffer } from 'node:buffer';
import { connect as connectTcp, type Socket } from 'node:net';
import { type ConnectionOptions, connect as connectTls } from 'node:tls';
import { invariant, KvError } from '@kvtier/errors';
import { type Head, headIn } from './answers.ts';
import { ChunkedBody } from './chunked.ts';

const headBytesMax = 4096;
const headsMax = 8; // a head of up to 32 KiB, grown in steps
/** Error bodies: enough for S3's XML. Larger ones, and chunked ones, cost the connection, not the answer. */
const smallBodyMax = 64 << 10;
/** Written at once; progress is seen in steps of this. */
const burstBytes = 1 << 20;
const restBytes = 64 << 10;

export interface Origin {
  readonly tls: boolean;
  readonly host: string;
  readonly port: number;
  /** PEM of the authorities to trust instead of the system's. */
  readonly ca?: string | undefined;
}

export interface HttpRequest {
  readonly method: 'GET' | 'PUT' | 'DELETE';
  /** Path and query. */
  readonly path: string;
  readonly headers: Readonly<Record<string, string>>;
  readonly body: readonly Uint8Array[];
  /** Where the body of a 200 or 206 goes; it must be exactly as long as these together. Empty: into the reply. */
  readonly targets: readonly Buffer[];
}

export interface HttpReply {
  readonly status: number;
  /** Names in lower case. */
  readonly headers: ReadonlyMap<string, string>;
  /** What did not go into targets. */
  readonly body: Buffer;
}

export interface TryLimits {
  /** On performance.now(). */
  readonly deadlineMs: number;
  /** Without a byte moved in either direction. */
  readonly idleMs: number;
}

interface Exchange {
  readonly request: HttpRequest;
  readonly limits: TryLimits;
  readonly resolve: (reply: HttpReply) => void;
  readonly reject: (error: KvError) => void;
  reply: { status: number; headers: ReadonlyMap<string, string> } | undefined;
  /** Where the next byte of the body goes: number in `sinks`, offset in it. */
  sinks: readonly Buffer[];
  sink: number;
  sinkOffset: number;
  bodyLeft: number;
  /** It is in the head buffer until it is whole. */
  chunked: ChunkedBody | undefined;
  sent: boolean;
  keep: boolean;
}

export class HttpConnection {
  readonly #socket: Socket;
  readonly #onIdle: (connection: HttpConnection) => void;
  readonly #onClosed: (connection: HttpConnection) => void;
  #head = Buffer.allocUnsafe(headBytesMax);
  #headBytes = 0;
  #exchange: Exchange | undefined;
  #idleTimer: NodeJS.Timeout | undefined;
  #deadlineTimer: NodeJS.Timeout | undefined;
  #closed = false;
  /** Exchanges that ended well: one that fails on a used connection may only have met a server that closed it. */
  exchangeCount = 0;

  constructor(
    origin: Origin,
    onIdle: (connection: HttpConnection) => void,
    onClosed: (connection: HttpConnection) => void,
  ) {
    this.#onIdle = onIdle;
    this.#onClosed = onClosed;
    const onread = {
      buffer: (): Buffer => this.#nextBuffer(),
      callback: (bytes: number): boolean => this.#received(bytes),
    };
    const to = { host: origin.host, port: origin.port, onread };
    // `onread` reaches the TLS socket, too; its types do not say so.
    const tls = { ...to, servername: /^[\d.:]+$/.test(origin.host) ? '' : origin.host, ALPNProtocols: ['http/1.1'] };
    const secure: ConnectionOptions = origin.ca === undefined ? tls : { ...tls, ca: origin.ca };
    this.#socket = origin.tls ? connectTls(secure) : connectTcp(to);
    this.#socket.setNoDelay(true);
    this.#socket.on('error', (error) => this.#fail('IO', error.message || (error as NodeJS.ErrnoException).code || ''));
    this.#socket.on('end', () => this.#fail('DISCONNECTED', 'the server closed the connection'));
    this.#socket.on('close', () => this.#fail('DISCONNECTED', 'the connection ended'));
  }

  get busy(): boolean {
    return this.#exchange !== undefined;
  }

  /** One exchange at a time. Rejects with KvError IO, DISCONNECTED, DEADLINE or PROTOCOL; then the connection is gone. */
  send(request: HttpRequest, limits: TryLimits): Promise<HttpReply> {
    invariant(this.#exchange === undefined, 'http: one exchange at a time');
    return new Promise((resolve, reject) => {
      if (this.#closed) {
        reject(new KvError('DISCONNECTED', 'the connection ended'));
        return;
      }
      this.#exchange = {
        ...{ request, limits, resolve, reject, reply: undefined },
        ...{ sinks: [], sink: 0, sinkOffset: 0, bodyLeft: 0, chunked: undefined },
        ...{ sent: false, keep: true },
      };
      const leftMs = Math.max(1, limits.deadlineMs - performance.now());
      this.#deadlineTimer = setTimeout(() => this.#fail('DEADLINE', 'the time limit was reached'), leftMs);
      this.#idleTimer = setTimeout(() => {
        this.#fail('DEADLINE', `nothing moved for ${limits.idleMs} ms`);
      }, limits.idleMs);
      this.#write(this.#exchange);
    });
  }

  destroy(): void {
    this.#fail('DISCONNECTED', 'the client was closed');
  }

  #write(exchange: Exchange): void {
    const { method, path, headers, body } = exchange.request;
    const lines = Object.entries(headers).map(([name, value]) => `${name}: ${value}\r\n`);
    const pieces: Uint8Array[] = [Buffer.from(`${method} ${path} HTTP/1.1\r\n${lines.join('')}\r\n`, 'latin1')];
    for (const part of body) {
      let at = 0;
      while (at < part.length) {
        // The few bytes behind a whole burst (an object's header makes them) do not wait for a turn of their own.
        const end = part.length - at <= burstBytes + restBytes ? part.length : at + burstBytes;
        pieces.push(part.subarray(at, end));
        at = end;
      }
    }
    let next = 0;
    const burst = (): void => {
      if (this.#exchange !== exchange) return; // answered early, or failed
      this.#idleTimer?.refresh();
      if (next === pieces.length) {
        exchange.sent = true;
        this.#endIfComplete(exchange);
        return;
      }
      this.#socket.cork();
      let bytes = 0;
      while (next < pieces.length && bytes < burstBytes) {
        const piece = pieces[next++]!;
        bytes += piece.length;
        const isLast = next === pieces.length || bytes >= burstBytes;
        this.#socket.write(piece, isLast ? (error) => error || burst() : undefined);
      }
      this.#socket.uncork();
    };
    burst();
  }

  /** Where the socket may put what arrives next. */
  #nextBuffer(): Buffer {
    const exchange = this.#exchange;
    if (exchange?.reply !== undefined && exchange.bodyLeft > 0) {
      const sink = exchange.sinks[exchange.sink]!;
      const end = Math.min(sink.length, exchange.sinkOffset + exchange.bodyLeft);
      return sink.subarray(exchange.sinkOffset, end);
    }
    if (this.#headBytes === this.#head.length) this.#head = Buffer.concat([this.#head], 2 * this.#head.length);
    return this.#head.subarray(this.#headBytes);
  }

  #received(bytes: number): boolean {
    const exchange = this.#exchange;
    if (exchange === undefined) {
      this.#fail('PROTOCOL', 'the server spoke unasked');
      return false;
    }
    this.#idleTimer?.refresh();
    if (exchange.chunked !== undefined) {
      this.#headBytes += bytes;
      this.#readChunks(exchange, exchange.chunked);
    } else if (exchange.reply !== undefined) this.#advance(exchange, bytes);
    else {
      this.#headBytes += bytes;
      this.#parseHead(exchange);
    }
    return !this.#closed;
  }

  #advance(exchange: Exchange, bytes: number): void {
    exchange.sinkOffset += bytes;
    exchange.bodyLeft -= bytes;
    while (exchange.sink < exchange.sinks.length && exchange.sinkOffset === exchange.sinks[exchange.sink]!.length) {
      exchange.sink++;
      exchange.sinkOffset = 0;
    }
    this.#endIfComplete(exchange);
  }

  #parseHead(exchange: Exchange): void {
    for (;;) {
      const end = this.#head.subarray(0, this.#headBytes).indexOf('\r\n\r\n');
      if (end === -1) {
        if (this.#headBytes >= headsMax * headBytesMax) this.#fail('PROTOCOL', 'the head of the answer does not end');
        return;
      }
      const head = headIn(this.#head.toString('latin1', 0, end));
      if (typeof head === 'string') {
        this.#fail('PROTOCOL', head);
        return;
      }
      const rest = this.#head.subarray(end + 4, this.#headBytes);
      this.#headBytes = 0;
      if (head.status >= 200) {
        this.#startBody(exchange, head, rest);
        return;
      }
      this.#headBytes = rest.copy(this.#head); // news on the way; the answer is still to come
    }
  }

  #startBody(exchange: Exchange, { status, headers, bodyBytes, keeps }: Head, rest: Buffer): void {
    exchange.reply = { status, headers };
    exchange.keep = keeps;
    const { targets } = exchange.request;
    if ((status === 200 || status === 206) && targets.length > 0) {
      const expected = targets.reduce((sum, target) => sum + target.length, 0);
      if (bodyBytes !== expected) {
        this.#fail('PROTOCOL', `a body of ${bodyBytes ?? 'unknown'} bytes where ${expected} were asked`);
        return;
      }
      exchange.sinks = targets;
    } else if (bodyBytes !== undefined && bodyBytes <= smallBodyMax) exchange.sinks = [Buffer.alloc(bodyBytes)];
    else if (bodyBytes === undefined && headers.get('transfer-encoding')?.toLowerCase() === 'chunked') {
      exchange.chunked = new ChunkedBody(smallBodyMax);
      this.#headBytes = rest.copy(this.#head);
      this.#readChunks(exchange, exchange.chunked);
      return;
    } else {
      // Of no known end, or large: an error page that nobody needs. The status is the answer; the connection goes.
      exchange.keep = false;
      this.#settle(exchange, Buffer.alloc(0));
      return;
    }
    exchange.bodyLeft = bodyBytes;
    if (rest.length > bodyBytes) {
      this.#fail('PROTOCOL', 'more bytes than the answer announced');
      return;
    }
    let at = 0;
    // At most the head buffer's worth: what came in one read with the head.
    while (at < rest.length) {
      const copied = rest.copy(exchange.sinks[exchange.sink]!, exchange.sinkOffset, at);
      at += copied;
      exchange.bodyLeft -= copied;
      exchange.sinkOffset += copied;
      if (exchange.sinkOffset === exchange.sinks[exchange.sink]!.length) {
        exchange.sink++;
        exchange.sinkOffset = 0;
      }
    }
    this.#endIfComplete(exchange);
  }

  /** The connection goes with it, as what may follow is nobody's. */
  #readChunks(exchange: Exchange, chunked: ChunkedBody): void {
    const body = chunked.read(this.#head.subarray(0, this.#headBytes));
    if (body === 'damaged') this.#fail('PROTOCOL', 'the chunks of the answer are none');
    else if (body !== undefined) this.#settle(exchange, body === 'large' ? Buffer.alloc(0) : body);
  }

  #endIfComplete(exchange: Exchange): void {
    if (exchange.reply === undefined || exchange.chunked !== undefined || exchange.bodyLeft > 0) return;
    // An answer before the request was sent: what is left of it cannot be taken back, so the connection goes.
    if (!exchange.sent) exchange.keep = false;
    this.#settle(exchange, exchange.sinks === exchange.request.targets ? Buffer.alloc(0) : exchange.sinks[0]!);
  }

  #settle(exchange: Exchange, body: Buffer): void {
    this.#exchange = undefined;
    this.#stopTimers();
    if (exchange.keep) {
      this.exchangeCount++;
      this.#onIdle(this);
    } else this.#close();
    exchange.resolve({ ...exchange.reply!, body });
  }

  #fail(code: 'IO' | 'DISCONNECTED' | 'DEADLINE' | 'PROTOCOL', message: string): void {
    const exchange = this.#exchange;
    this.#exchange = undefined;
    this.#stopTimers();
    this.#close(); // before anybody hears of it: nothing may arrive in their buffers any more
    exchange?.reject(new KvError(code, message));
  }

  #close(): void {
    if (this.#closed) return;
    this.#closed = true;
    this.#socket.destroy();
    this.#onClosed(this);
  }

  #stopTimers(): void {
    clearTimeout(this.#deadlineTimer);
    clearTimeout(this.#idleTimer);
  }
}

/**
 * One connection to a Redis server that moves values, and nothing else, between a socket and slots of the arena: a minimal
 * RESP2 writer and reader.
 *
 *     SET   header text ─┐
 *           arena view  ─┼─ one writev, no copy     GETRANGE   "$N\r\n" ─▶ scratch (64 bytes)
 *           tail text   ─┘                                     N bytes  ─▶ the arena view itself
 *
 * Node reads into the buffer that we name before each read (`onread`): the scratch while text is expected, the rest of the view
 * while a value arrives. So at most a scratch's worth of a value is ever copied. Invariants: replies end jobs in the order sent;
 * once `destroy` has returned, nothing reads or writes any view any more, and every job has ended. What is not understood ends
 * the connection: there is no resynchronising.
 */
import { connect as connectTcp, type Socket } from 'node:net';
import { connect as connectTls, type ConnectionOptions as TlsOptions } from 'node:tls';
import type { RedisAddress, RedisLogin } from '@kvtier/redis';

/** 'ok'; 'none': nothing there; 'length': not as many bytes as asked for; 'lost': no answer. Else Redis's error line. */
export type MoveResult = 'ok' | 'none' | 'length' | 'lost' | { readonly error: string };

/** A key's value out of `view`, or a piece of one into it. `onDone` is called exactly once. */
export interface PieceJob {
  readonly kind: 'get' | 'set';
  readonly key: string;
  readonly view: Buffer;
  /** Get: where in the value the piece begins, and whether it must be the last. */
  readonly start: number;
  readonly toEnd: boolean;
  /** On the clock of performance.now(). */
  readonly deadlineMs: number;
  /** Sent behind an ASKING: the slot is on its way to this server. */
  readonly asking: boolean;
  readonly onDone: (result: MoveResult) => void;
}

interface Expected {
  /** undefined: the answer to AUTH, SELECT or ASKING, which must be "+OK". */
  readonly job: PieceJob | undefined;
}

const scratchBytes = 64;
const dropped = Buffer.alloc(64 << 10);
const maxLineBytes = 4096;
const lineEnd = '\r\n';
const setTail = Buffer.from('\r\n$2\r\nXX\r\n');

const command = (...words: readonly string[]): string =>
  `*${words.length}\r\n${words.map((word) => `$${Buffer.byteLength(word)}\r\n${word}\r\n`).join('')}`;

/** What a connection says first, and how many times +OK that is answered with. */
export function loginOf({ username, password, database }: RedisLogin): { text: Buffer; replies: number } {
  const commands: string[] = [];
  if (password !== undefined) commands.push(command('AUTH', ...(username === undefined ? [] : [username]), password));
  if (database !== undefined && database !== 0) commands.push(command('SELECT', String(database)));
  return { text: Buffer.from(commands.join('')), replies: commands.length };
}

export class PieceConnection {
  readonly #socket: Socket;
  readonly #scratch = Buffer.alloc(scratchBytes);
  readonly #expected: Expected[] = [];
  readonly #onReady: () => void;
  readonly #onEnd: (reason: string, wasReady: boolean) => void;
  readonly #connectTimer: NodeJS.Timeout;
  /** Protocol text that has arrived and is not a whole line yet. */
  #line = '';
  /** The value that is arriving, and how much of it is in place. */
  #body: { readonly view: Buffer; filled: number } | undefined;
  /** Bytes still to come of a value of another length than asked for: read, and dropped. */
  #skipBytes = 0;
  /** Of the "\r\n" behind a value. */
  #tailBytes = 0;
  /** What the value that is arriving will have been. */
  #bodyIs: 'ok' | 'none' | 'length' = 'ok';
  #logins = 0;
  #ready = false;
  #ended = false;

  constructor(
    address: RedisAddress,
    login: RedisLogin,
    on: { ready: () => void; end: (reason: string, wasReady: boolean) => void },
  ) {
    this.#onReady = on.ready;
    this.#onEnd = on.end;
    const onread = {
      buffer: () => this.#target(),
      callback: (bytes: number, buffer: Uint8Array) => this.#arrived(bytes, buffer),
    };
    const place =
      address.path === undefined ? { host: address.host ?? '127.0.0.1', port: address.port! } : { path: address.path };
    const onConnect = (): void => this.#login(login);
    // Types name a Buffer only; Node takes a function too, and asks it before every read (net.Socket, `onread`).
    const options = { ...place, onread: onread as never, noDelay: true };
    this.#socket =
      login.tls === undefined
        ? connectTcp(options, onConnect)
        : connectTls(
            { ...login.tls, ...options, ...serverName(login.tls, address.tlsName ?? address.host) },
            onConnect,
          );
    this.#socket.on('error', (error) => this.destroy(error.message));
    this.#socket.on('close', () => this.destroy('the server closed the connection'));
    this.#socket.on('end', () => this.destroy('the server closed the connection'));
    this.#connectTimer = setTimeout(() => this.destroy('no connection in time'), login.connectTimeoutMs);
  }

  get ready(): boolean {
    return this.#ready && !this.#ended;
  }

  /** Jobs sent and not ended. */
  get inFlight(): number {
    return this.#expected.length;
  }

  /** By when the oldest job must have ended, on the clock of performance.now(); what goes before it (ASKING) is its own. */
  get deadlineMs(): number {
    return this.#expected.find(({ job }) => job !== undefined)?.job?.deadlineMs ?? Number.POSITIVE_INFINITY;
  }

  send(job: PieceJob): void {
    const { kind, key, view, asking } = job;
    const preamble = asking ? command('ASKING') : '';
    if (asking) this.#expected.push({ job: undefined });
    this.#expected.push({ job });
    if (kind === 'get') {
      const { start, toEnd } = job; // to the end whatever it is: more than is expected must not go unnoticed
      const range = [String(start), String(toEnd ? -1 : start + view.length - 1)];
      this.#socket.write(preamble + command('GETRANGE', key, ...range), 'latin1');
      return;
    }
    this.#socket.cork();
    this.#socket.write(`${preamble}*4\r\n$3\r\nSET\r\n$${key.length}\r\n${key}\r\n$${view.length}${lineEnd}`, 'latin1');
    this.#socket.write(view);
    this.#socket.write(setTail);
    this.#socket.uncork();
  }

  /** Closes the handle in this turn, so that no byte moves afterwards; then every job is 'lost'. */
  destroy(reason: string): void {
    if (this.#ended) return;
    const wasReady = this.#ready;
    this.#ended = true;
    clearTimeout(this.#connectTimer);
    this.#socket.destroy();
    this.#body = undefined;
    for (const { job } of this.#expected.splice(0)) job?.onDone('lost');
    this.#onEnd(reason, wasReady);
  }

  #login(login: RedisLogin): void {
    const { text, replies } = loginOf(login);
    for (let i = 0; i < replies; i++) this.#expected.push({ job: undefined });
    this.#logins = replies;
    if (replies === 0) this.#becomeReady();
    else this.#socket.write(text);
  }

  #becomeReady(): void {
    this.#ready = true;
    clearTimeout(this.#connectTimer);
    this.#onReady();
  }

  /** Where the next bytes go. */
  #target(): Buffer {
    const body = this.#body;
    if (this.#skipBytes > 0) return dropped.subarray(0, this.#skipBytes);
    return body === undefined || this.#ended ? this.#scratch : body.view.subarray(body.filled);
  }

  #arrived(bytes: number, buffer: Uint8Array): boolean {
    if (this.#ended) return false;
    const body = this.#body;
    if (this.#skipBytes > 0) {
      this.#skip(bytes);
      return true;
    }
    if (body !== undefined) {
      body.filled += bytes;
      if (body.filled === body.view.length) this.#bodyEnded();
      return true;
    }
    this.#parse(Buffer.from(buffer.buffer, buffer.byteOffset, bytes));
    return true;
  }

  /** The value's bytes are in place; its line end is still to come. */
  #bodyEnded(): void {
    this.#body = undefined;
    this.#tailBytes = 2;
  }

  #skip(bytes: number): void {
    this.#skipBytes -= bytes;
    if (this.#skipBytes === 0) this.#tailBytes = 2;
  }

  #parse(text: Buffer): void {
    let at = 0;
    while (at < text.length && !this.#ended) {
      if (this.#tailBytes > 0) {
        const expected = this.#tailBytes === 2 ? 13 : 10;
        if (text[at++] !== expected) {
          this.destroy('the server sent something that is not RESP2');
          return;
        }
        if (--this.#tailBytes === 0) {
          const result = this.#bodyIs;
          this.#bodyIs = 'ok';
          this.#end(result);
        }
      } else if (this.#skipBytes > 0) {
        const bytes = Math.min(this.#skipBytes, text.length - at);
        at += bytes;
        this.#skip(bytes);
      } else if (this.#body !== undefined) {
        const body = this.#body;
        const bytes = text.copy(body.view, body.filled, at);
        at += bytes;
        body.filled += bytes;
        if (body.filled === body.view.length) this.#bodyEnded();
      } else {
        const end = text.indexOf(10, at);
        this.#line += text.toString('latin1', at, end === -1 ? text.length : end);
        if (this.#line.length > maxLineBytes) {
          this.destroy('the server sent a line without an end');
          return;
        }
        if (end === -1) return;
        at = end + 1;
        const line = this.#line.trimEnd();
        this.#line = '';
        this.#onLine(line);
      }
    }
  }

  #onLine(line: string): void {
    const next = this.#expected[0];
    if (next === undefined) {
      this.destroy(`the server sent what nobody asked for: ${line}`);
      return;
    }
    const { job } = next;
    if (line[0] === '-') {
      if (job === undefined) {
        this.destroy(line.slice(1)); // a login that failed
        return;
      }
      this.#end({ error: line.slice(1) });
    } else if (line === '+OK' && job === undefined) {
      this.#expected.shift();
      if (!this.#ready && --this.#logins === 0) this.#becomeReady();
    } else if (line === '+OK' && job!.kind === 'set') this.#end('ok');
    else if (line === '$-1' && job !== undefined) this.#end('none');
    else if (line[0] === '$' && job?.kind === 'get') {
      const bytes = /^\$\d{1,15}$/.test(line) ? Number(line.slice(1)) : undefined;
      if (bytes === undefined) this.destroy(`not a length: ${line.slice(0, 40)}`);
      else if (bytes === 0) {
        this.#bodyIs = 'none'; // GETRANGE's answer when there is no such key
        this.#tailBytes = 2;
      } else if (bytes === job.view.length) {
        this.#body = { view: job.view, filled: 0 };
      } else {
        this.#bodyIs = 'length';
        this.#skipBytes = bytes;
      }
    } else this.destroy(`the server sent something that is not RESP2: ${line.slice(0, 40)}`);
  }

  #end(result: MoveResult): void {
    this.#expected.shift()!.job!.onDone(result);
    if (!this.#ended) this.#onReady();
  }
}

/** A name for SNI; an address has none. */
function serverName(tls: TlsOptions, host = ''): { servername?: string } {
  return tls.servername !== undefined || host === '' || /^[\d.]+$|:/.test(host) ? {} : { servername: host };
}

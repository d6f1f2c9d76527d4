/**
 * An HTTP proxy before a real S3 server, for what real servers do only on bad days: answers of 500 and 503, bodies that end early,
 * uploads that are torn, bytes that flip, answers that never come. `fault` is asked at each request.
 */
import { createServer, type IncomingMessage, request, type Server, type ServerResponse } from 'node:http';
import { createServer as createTlsServer } from 'node:https';
import type { AddressInfo } from 'node:net';

/** A status to answer with; or the answer's body cut in the middle, one of its bits flipped, the request's body torn; or silence. */
export type S3Fault = 500 | 503 | 'cut' | 'flip' | 'tear' | 'hang' | undefined;

export class S3Proxy {
  readonly #server: Server;
  readonly #target: URL;
  readonly #tls: boolean;
  fault: (request: { readonly method: string; readonly path: string; readonly count: number }) => S3Fault = () =>
    undefined;
  count = 0;

  static async start(target: string, certificate?: { readonly key: string; readonly cert: string }): Promise<S3Proxy> {
    const proxy = new S3Proxy(target, certificate);
    await new Promise<void>((resolve) => proxy.#server.listen(0, '127.0.0.1', resolve));
    return proxy;
  }

  private constructor(target: string, certificate?: { readonly key: string; readonly cert: string }) {
    this.#target = new URL(target);
    this.#tls = certificate !== undefined;
    const listener = (message: IncomingMessage, reply: ServerResponse): void => this.#serve(message, reply);
    this.#server = certificate === undefined ? createServer(listener) : createTlsServer(certificate, listener);
  }

  get url(): string {
    return `${this.#tls ? 'https' : 'http'}://localhost:${(this.#server.address() as AddressInfo).port}`;
  }

  async stop(): Promise<void> {
    const closed = new Promise((resolve) => this.#server.close(resolve));
    this.#server.closeAllConnections();
    await closed;
  }

  #serve(message: IncomingMessage, reply: ServerResponse): void {
    const { method = '', url = '', headers } = message;
    const fault = this.fault({ method, path: url, count: ++this.count });
    message.on('error', () => {});
    reply.on('error', () => {});
    if (fault === 'hang') return;
    if (fault === 500 || fault === 503) {
      message.resume().on('end', () => {
        const body = `<Error><Code>${fault === 503 ? 'SlowDown' : 'InternalError'}</Code></Error>`;
        reply.writeHead(fault, { 'content-length': body.length }).end(body);
      });
      return;
    }
    const { hostname, port } = this.#target;
    const onward = request({ hostname, port, method, path: url, headers }, (answer) => {
      reply.writeHead(answer.statusCode!, answer.headers);
      const middle = Number(answer.headers['content-length'] ?? 0) >> 1;
      let bytes = 0;
      answer.on('data', (chunk: Buffer) => {
        const before = bytes;
        bytes += chunk.length;
        const isMiddle = before <= middle && middle < bytes;
        if (fault === 'cut' && isMiddle) {
          reply.write(chunk.subarray(0, middle - before), () => message.socket.destroy());
          answer.destroy();
          return;
        }
        if (fault === 'flip' && isMiddle) chunk[middle - before]! ^= 1;
        reply.write(chunk);
      });
      answer.on('end', () => reply.end());
      answer.on('error', () => message.socket.destroy());
    });
    onward.on('error', () => message.socket.destroy());
    if (fault !== 'tear') {
      message.pipe(onward);
      reply.once('close', () => onward.destroy());
      return;
    }
    message.once('data', (chunk: Buffer) => {
      onward.write(chunk.subarray(0, chunk.length >> 1), () => {
        onward.destroy();
        message.socket.destroy();
      });
    });
  }
}

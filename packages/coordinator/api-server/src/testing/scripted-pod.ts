/** An HTTP server with as much of vLLM's API as forwarding needs: tests say what it answers, and see what it was asked. */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';

export interface Asked {
  readonly path: string;
  readonly headers: IncomingMessage['headers'];
  readonly body: string;
  readonly response: ServerResponse;
  /** Its client left before it was answered. */
  readonly left: Promise<void>;
}

export class ScriptedPod {
  readonly #model: string;
  readonly seen: Asked[] = [];
  answer: (asked: Asked) => void = () => {};
  #server: Server | undefined;

  constructor(model: string) {
    this.#model = model;
  }

  get address(): string {
    return `http://127.0.0.1:${(this.#server!.address() as AddressInfo).port}`;
  }

  async start(): Promise<void> {
    this.#server = createServer((request, response) => void this.#serve(request, response));
    await new Promise<void>((resolve) => this.#server!.listen(0, '127.0.0.1', resolve));
  }

  async stop(): Promise<void> {
    this.#server!.closeAllConnections();
    await new Promise((resolve) => this.#server!.close(resolve));
  }

  async #serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const path = request.url!;
    if (request.method === 'GET') return void response.end(this.#told(path));
    let body = '';
    for await (const part of request.setEncoding('utf8')) body += part;
    const left = new Promise<void>((resolve) => response.once('close', () => !response.writableFinished && resolve()));
    const asked = { path, headers: request.headers, body, response, left };
    this.seen.push(asked);
    this.answer(asked);
  }

  #told(path: string): string {
    if (path === '/v1/models') return JSON.stringify({ data: [{ id: this.#model, max_model_len: 8_192 }] });
    if (path === '/metrics') return 'vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n';
    return '';
  }
}

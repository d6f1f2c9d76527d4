/** A bucket in this process, for what a test has to see or hold up request by request: conditions, listings, ranges, and nothing else. */
import { createHash } from 'node:crypto';
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';

/**
 * A status to answer with, or one with the server's word for it; or no answer before the promise is fulfilled, then with the status that
 * it has, if that is one.
 */
export type BucketFault = number | { readonly status: number; readonly word: string } | Promise<unknown> | undefined;

interface Held {
  readonly body: Buffer;
  readonly etag: string;
}

export class FakeBucket {
  readonly name = 'b';
  /** By key, with the prefix. */
  readonly objects = new Map<string, Held>();
  /** Asked at each request; `key`: the object's, or "" of a listing; `replaces`: it comes with an If-Match. */
  fault: (request: { readonly method: string; readonly key: string; readonly replaces: boolean }) => BucketFault = () =>
    undefined;
  readonly requests: string[] = [];
  /** Whether it has heard of If-None-Match. */
  keepsConditions = true;
  readonly #server: Server;

  static async start(): Promise<FakeBucket> {
    const bucket = new FakeBucket();
    await new Promise<void>((resolve) => bucket.#server.listen(0, '127.0.0.1', resolve));
    return bucket;
  }

  private constructor() {
    this.#server = createServer((request, response) => {
      const chunks: Buffer[] = [];
      request.on('data', (chunk: Buffer) => chunks.push(chunk));
      request.on('end', () => void this.#answer(request, Buffer.concat(chunks), response));
      for (const each of [request, response]) each.on('error', () => {});
    });
  }

  get endpoint(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  put(key: string, body: Buffer): void {
    this.objects.set(key, { body, etag: createHash('md5').update(body).digest('hex') });
  }

  async stop(): Promise<void> {
    this.#server.closeAllConnections();
    await new Promise((resolve) => this.#server.close(resolve));
  }

  async #answer({ method = '', url = '', headers }: IncomingMessage, body: Buffer, to: ServerResponse): Promise<void> {
    const { pathname, searchParams } = new URL(url, 'http://x');
    const isListing = searchParams.has('list-type');
    const key = isListing ? '' : pathname.slice(`/${this.name}/`.length);
    this.requests.push(`${method} ${key}`);
    const fault = await this.fault({ method, key, replaces: method === 'PUT' && 'if-match' in headers });
    const refusal = typeof fault === 'number' ? { status: fault, word: 'Fault' } : fault;
    if (isRefusal(refusal)) {
      to.writeHead(refusal.status).end(`<Error><Code>${refusal.word}</Code></Error>`);
      return;
    }
    if (isListing) this.#list(searchParams.get('prefix') ?? '', to);
    else if (method === 'PUT') this.#put(key, body, headers, to);
    else if (method === 'DELETE') {
      this.objects.delete(key);
      to.writeHead(204).end();
    } else this.#get(key, headers, to);
  }

  #list(prefix: string, to: ServerResponse): void {
    const contents = [...this.objects].sort(([a], [b]) => (a < b ? -1 : 1)).filter(([key]) => key.startsWith(prefix));
    const date = new Date().toISOString();
    const items = contents.map(([key, { body, etag }]) => {
      return `<Contents><Key>${key}</Key><LastModified>${date}</LastModified><ETag>"${etag}"</ETag><Size>${body.length}</Size></Contents>`;
    });
    to.setHeader('content-type', 'application/xml');
    const result = `<ListBucketResult><IsTruncated>false</IsTruncated>${items.join('')}</ListBucketResult>`;
    to.end(`<?xml version="1.0"?>${result}`);
  }

  #put(key: string, body: Buffer, headers: IncomingMessage['headers'], to: ServerResponse): void {
    const held = this.objects.get(key);
    const match = headers['if-match']?.replaceAll('"', '');
    if ((this.keepsConditions && headers['if-none-match'] && held) || (match !== undefined && held?.etag !== match))
      to.writeHead(412).end();
    else {
      this.put(key, body);
      to.writeHead(200, { etag: `"${this.objects.get(key)!.etag}"` }).end();
    }
  }

  #get(key: string, headers: IncomingMessage['headers'], to: ServerResponse): void {
    const held = this.objects.get(key);
    const match = headers['if-match']?.replaceAll('"', '');
    if (held === undefined || (match !== undefined && match !== held.etag)) {
      to.writeHead(held === undefined ? 404 : 412).end();
      return;
    }
    const [, first, last] = /bytes=(\d+)-(\d+)/.exec(headers.range ?? '') ?? [];
    const body = first === undefined ? held.body : held.body.subarray(Number(first), Number(last) + 1);
    to.writeHead(first === undefined ? 200 : 206, { 'content-length': body.length }).end(body);
  }
}

const isRefusal = (fault: unknown): fault is { readonly status: number; readonly word: string } =>
  typeof fault === 'object' && fault !== null && 'status' in fault;

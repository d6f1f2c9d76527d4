/**
 * An HTTPS server that speaks the part of Kubernetes' API that discovery uses, as the API's documentation has it: lists in pages,
 * watches from a version with bookmarks and time-outs, 410 for what it remembers no more, bearer tokens. `fault` makes it a bad one.
 */
import { readFileSync, writeFileSync } from 'node:fs';
import type { IncomingMessage, Server, ServerResponse } from 'node:http';
import { createServer } from 'node:https';
import type { Socket } from 'node:net';
import { join } from 'node:path';
import { freePort } from '../../../../../infra/ports.ts';
import { type Certificate, makeCertificate } from '../../../../../infra/redis/servers.ts';

export interface KubeObject {
  metadata: { name: string; labels?: Record<string, string>; [key: string]: unknown };
  [key: string]: unknown;
}
type Kind = 'pods' | 'endpointslices';
interface Change {
  readonly version: number;
  readonly kind: Kind;
  /** undefined: it was not there. */
  readonly before: KubeObject | undefined;
  readonly after: KubeObject | undefined;
}
interface Watcher {
  readonly kind: Kind;
  readonly selector: string;
  readonly response: ServerResponse;
}
export interface Asked {
  readonly kind: Kind;
  readonly verb: 'list' | 'watch';
  readonly query: URLSearchParams;
}

export class KubeServer {
  readonly token = 'a-token';
  readonly namespace = 'serving';
  readonly asked: Asked[] = [];
  /** Does something else with a question; true: it has been dealt with. */
  fault: ((asked: Asked, response: ServerResponse) => boolean) | undefined;
  /** How it says that a version is gone: by its status, or by an event. */
  goneAs: 'status' | 'event' = 'event';
  readonly #tls: Certificate;
  readonly #dir: string;
  readonly #objects: Record<Kind, Map<string, KubeObject>> = { pods: new Map(), endpointslices: new Map() };
  #history: Change[] = [];
  #version = 100;
  #oldest = 100;
  #server: Server | undefined;
  #port = 0;
  readonly #sockets = new Set<Socket>();
  readonly #watchers = new Set<Watcher>();

  constructor(dir: string) {
    this.#dir = dir;
    this.#tls = makeCertificate(dir);
  }

  async start(): Promise<void> {
    const options = { key: readFileSync(this.#tls.keyFile), cert: readFileSync(this.#tls.certFile) };
    this.#port ||= await freePort(); // one that the kernel gives would be another's while it is stopped
    const server = createServer(options, (request, response) => this.#answer(request, response));
    server.on('connection', (socket: Socket) => {
      this.#sockets.add(socket);
      socket.once('close', () => this.#sockets.delete(socket));
    });
    await new Promise<void>((resolve, reject) => {
      server.once('error', reject);
      server.listen(this.#port, '127.0.0.1', resolve);
    });
    this.#server = server;
  }

  /** Its connections end in the middle of whatever they do. */
  async stop(): Promise<void> {
    const server = this.#server;
    this.#server = undefined;
    if (server === undefined) return;
    const closed = new Promise((resolve) => server.close(resolve));
    this.cut();
    await closed;
  }

  /** All connections are lost, and the server stays. */
  cut(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  /** A file that leads here. */
  kubeconfig(change: { token?: string; caFile?: string } = {}): string {
    const file = join(this.#dir, `kubeconfig-${Math.random().toString(36).slice(2)}`);
    const text = {
      ...{ apiVersion: 'v1', kind: 'Config', 'current-context': 'here' },
      clusters: [
        {
          name: 'cluster',
          cluster: {
            server: `https://127.0.0.1:${this.#port}`,
            'certificate-authority': change.caFile ?? this.#tls.certFile,
          },
        },
      ],
      users: [{ name: 'user', user: { token: change.token ?? this.token } }],
      contexts: [{ name: 'here', context: { cluster: 'cluster', user: 'user', namespace: this.namespace } }],
    };
    writeFileSync(file, JSON.stringify(text)); // JSON is YAML
    return file;
  }

  get watcherCount(): number {
    return this.#watchers.size;
  }

  put(kind: Kind, object: KubeObject): void {
    const before = this.#objects[kind].get(object.metadata.name);
    const version = ++this.#version;
    const after = { ...object, metadata: { ...object.metadata, resourceVersion: String(version) } };
    this.#objects[kind].set(object.metadata.name, after);
    this.#change({ version, kind, before, after });
  }

  remove(kind: Kind, name: string): void {
    const before = this.#objects[kind].get(name);
    if (before === undefined) return;
    this.#objects[kind].delete(name);
    const version = ++this.#version;
    const last = { ...before, metadata: { ...before.metadata, resourceVersion: String(version) } };
    this.#change({ version, kind, before: last, after: undefined });
  }

  /** Nothing is remembered of what was before now. */
  forget(): void {
    this.#version++; // something else has changed
    this.#oldest = this.#version;
    this.#history = [];
  }

  bookmark(): void {
    for (const { kind, response } of this.#watchers) {
      const object = { kind: kind === 'pods' ? 'Pod' : 'EndpointSlice', metadata: { resourceVersion: this.#now } };
      send(response, { type: 'BOOKMARK', object });
    }
  }

  /** To everyone who watches. */
  say(text: string): void {
    for (const { response } of this.#watchers) response.write(text);
  }

  endWatches(): void {
    for (const watcher of this.#watchers) this.#end(watcher);
  }

  #end(watcher: Watcher): void {
    this.#watchers.delete(watcher);
    watcher.response.end();
  }

  get #now(): string {
    return String(this.#version);
  }

  #change(change: Change): void {
    this.#history.push(change);
    for (const watcher of this.#watchers) tell(watcher, change);
  }

  #answer(request: IncomingMessage, response: ServerResponse): void {
    const url = new URL(request.url!, 'https://here');
    const kind = url.pathname.endsWith('/pods') ? 'pods' : 'endpointslices';
    const query = url.searchParams;
    const asked: Asked = { kind, verb: query.get('watch') === 'true' ? 'watch' : 'list', query };
    this.asked.push(asked);
    if (this.fault?.(asked, response)) return;
    const group = kind === 'pods' ? '/api/v1' : '/apis/discovery.k8s.io/v1';
    if (request.headers.authorization !== `Bearer ${this.token}`) refuse(response, 401, 'Unauthorized');
    else if (url.pathname !== `${group}/namespaces/${this.namespace}/${kind}`) refuse(response, 404, 'not found');
    else if (asked.verb === 'list') this.#list(asked, response);
    else this.#watch(asked, response);
  }

  #list({ kind, query }: Asked, response: ServerResponse): void {
    const [version = this.#version, from = 0] = (query.get('continue') ?? '').split(':').filter(Boolean).map(Number);
    if (version < this.#oldest) {
      refuse(response, 410, 'The provided continue parameter is too old');
      return;
    }
    const all = [...this.#objects[kind].values()].filter((each) => matches(each, query.get('labelSelector') ?? ''));
    const limit = Number(query.get('limit') ?? all.length);
    const items = all.slice(from, from + limit);
    const next = from + limit < all.length ? { continue: `${version}:${from + limit}` } : {};
    response.writeHead(200, { 'content-type': 'application/json' });
    response.end(JSON.stringify({ kind: 'List', metadata: { resourceVersion: String(version), ...next }, items }));
  }

  #watch({ kind, query }: Asked, response: ServerResponse): void {
    const from = Number(query.get('resourceVersion'));
    if (from < this.#oldest && this.goneAs === 'status') {
      refuse(response, 410, 'too old resource version');
      return;
    }
    response.writeHead(200, { 'content-type': 'application/json' });
    response.flushHeaders();
    if (from < this.#oldest) {
      send(response, { type: 'ERROR', object: { kind: 'Status', code: 410, message: 'too old resource version' } });
      response.end();
      return;
    }
    const watcher = { kind, selector: query.get('labelSelector') ?? '', response };
    for (const change of this.#history) if (change.version > from) tell(watcher, change);
    this.#watchers.add(watcher);
    const timer = setTimeout(() => this.#end(watcher), 1_000 * Number(query.get('timeoutSeconds') ?? 60));
    response.once('close', () => {
      clearTimeout(timer);
      this.#watchers.delete(watcher);
    });
  }
}

/** An object that a selector names no more has been deleted, for who watches by it. */
function tell({ kind, selector, response }: Watcher, change: Change): void {
  if (kind !== change.kind) return;
  const was = change.before !== undefined && matches(change.before, selector);
  const is = change.after !== undefined && matches(change.after, selector);
  if (is) send(response, { type: was ? 'MODIFIED' : 'ADDED', object: change.after });
  else if (was) send(response, { type: 'DELETED', object: change.after ?? change.before });
}

const send = (response: ServerResponse, event: object): void => void response.write(`${JSON.stringify(event)}\n`);

export function refuse(response: ServerResponse, code: number, message: string, headers: Record<string, string> = {}) {
  response.writeHead(code, { 'content-type': 'application/json', ...headers });
  response.end(JSON.stringify({ kind: 'Status', status: 'Failure', message, code }));
}

const matches = ({ metadata }: KubeObject, selector: string): boolean =>
  selector
    .split(',')
    .filter(Boolean)
    .every((term) => {
      const [key, value] = term.split('=') as [string, string?];
      return value === undefined ? key in (metadata.labels ?? {}) : metadata.labels?.[key] === value;
    });

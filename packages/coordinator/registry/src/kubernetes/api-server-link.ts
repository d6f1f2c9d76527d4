/**
 * Questions to a Kubernetes API server. Where it is and what to show it (kubeconfig, service account, token files that are renewed,
 * plug-ins, proxies) is `KubeConfig` of @kubernetes/client-node. The questions are asked here: its own watch has no limit for the
 * first answer, none for a line, and drops half lines without a word.
 *
 * Invariants: every answer has a limit in time and in bytes; every failure is a KvError of one line; `gone` says that a version is
 * older than what the server remembers (410), so that all has to be listed anew.
 */
import { get as httpGet, type IncomingMessage } from 'node:http';
import { get as httpsGet, type RequestOptions } from 'node:https';
import { KvError, within } from '@kvtier/errors';
import { firstOf } from '@kvtier/runtime';

/** One page of a list: so many objects that reading them is no long turn. */
const maxPageBytes = 8 << 20;
/** Of a watch: an object in etcd has at most 1.5 MiB. */
const maxLineBytes = 2 << 20;
const maxReasonLength = 300;
const longestRetryAfterMs = 10_000;
/** A kubeconfig whose credentials are refused is read again so often at most. */
const rereadMs = 1_000;

export interface KubernetesAccess {
  readonly kubeconfig?: string | undefined;
  readonly context?: string | undefined;
  readonly namespace?: string | undefined;
  readonly timeLimitMs: number;
}

/** What an API server refused. */
export class ApiRefusal extends Error {
  readonly status: number;
  readonly retryAfterMs: number;

  constructor(status: number, reason: string, retryAfterMs = 0) {
    super(`it answered ${status}${reason === '' ? '' : `: ${reason}`}${remedies[status] ?? ''}`);
    this.status = status;
    this.retryAfterMs = retryAfterMs;
  }

  get isGone(): boolean {
    return this.status === 410;
  }
}

const remedies: Readonly<Record<number, string>> = {
  401: '; correct the credentials of the kubeconfig, or mount a service account token',
  403: '; allow get, list and watch on pods and endpointslices (docs/cluster.md)',
};

/** What is used of `KubeConfig`. */
interface Access {
  loadFromFile(file: string): void;
  loadFromCluster(): void;
  setCurrentContext(context: string): void;
  getCurrentCluster(): { readonly server: string } | null;
  getContextObject(name: string): { readonly namespace?: string | undefined } | null;
  getCurrentContext(): string;
  applyToHTTPSOptions(options: RequestOptions): Promise<void>;
}

export class ApiServerLink {
  readonly namespace: string;
  #access: Access;
  /** The same from what lies in the file now; undefined: what is shown is renewed by itself. */
  readonly #reread: (() => Access) | undefined;
  #readAtMs = performance.now();
  readonly #server: URL;
  readonly #timeLimitMs: number;

  private constructor(
    access: Access,
    reread: (() => Access) | undefined,
    server: URL,
    namespace: string,
    timeLimitMs: number,
  ) {
    this.#access = access;
    this.#reread = reread;
    this.#server = server;
    this.namespace = namespace;
    this.#timeLimitMs = timeLimitMs;
  }

  /** KvError CONFIG: there is no such file, context or cluster. Asks nobody. */
  static async open({ kubeconfig, context, namespace, timeLimitMs }: KubernetesAccess): Promise<ApiServerLink> {
    const { KubeConfig } = await import('@kubernetes/client-node');
    const access: Access = new KubeConfig();
    try {
      if (kubeconfig !== undefined) access.loadFromFile(kubeconfig);
      else if (process.env.KUBERNETES_SERVICE_HOST) access.loadFromCluster();
      else throw new Error('this is no pod (KUBERNETES_SERVICE_HOST is not set)');
      if (context !== undefined) access.setCurrentContext(context);
      const server = access.getCurrentCluster()?.server;
      if (server === undefined) throw new Error(`context "${access.getCurrentContext()}" names no cluster`);
      const ours = namespace ?? access.getContextObject(access.getCurrentContext())?.namespace ?? 'default';
      const used = access.getCurrentContext();
      const read = (file: string): Access => {
        const now: Access = new KubeConfig();
        now.loadFromFile(file);
        now.setCurrentContext(used); // the file's own may be that of another cluster by now
        return now;
      };
      const reread = kubeconfig === undefined ? undefined : () => read(kubeconfig);
      return new ApiServerLink(access, reread, new URL(server), ours, timeLimitMs);
    } catch (error) {
      const place = kubeconfig ?? 'the service account of this pod';
      const why = (error as Error).message.split('\n')[0]!;
      throw new KvError('CONFIG', `discovery: ${place}: ${why}; name a kubeconfig with a reachable context`);
    }
  }

  /** The answer, parsed as JSON and not validated. @throws ApiRefusal, KvError */
  async get(path: string, query: Readonly<Record<string, string>>, signal: AbortSignal): Promise<unknown> {
    return await within('kubernetes', this.#timeLimitMs, async (limit) => {
      const first = firstOf([signal, limit]);
      try {
        const response = await this.#ask(path, query, first.signal);
        return JSON.parse(await textOf(response, maxPageBytes)) as unknown;
      } finally {
        first.end();
      }
    });
  }

  /**
   * Lines of a watch as they come, parsed as JSON and not validated, until the server ends it; `onOpen` once it has begun. A line
   * that is cut off is an error. @throws ApiRefusal, KvError
   */
  async watch(
    path: string,
    query: Readonly<Record<string, string>>,
    { limitMs, signal, onOpen }: { limitMs: number; signal: AbortSignal; onOpen: () => void },
    onLine: (value: unknown) => void,
  ): Promise<void> {
    await within('kubernetes', limitMs, async (limit) => {
      const ended = new AbortController();
      const first = firstOf([signal, limit, ended.signal]);
      try {
        const response = await within('kubernetes', this.#timeLimitMs, () => this.#ask(path, query, first.signal));
        onOpen();
        await readLines(response, onLine);
      } finally {
        ended.abort(); // a call that goes on ends while it still hears of it
        first.end();
      }
    });
  }

  /** As `#askOnce`; with what the kubeconfig says now, where what it said before is refused. */
  async #ask(path: string, query: Readonly<Record<string, string>>, signal: AbortSignal): Promise<IncomingMessage> {
    try {
      return await this.#askOnce(path, query, signal);
    } catch (error) {
      if (!(error instanceof ApiRefusal && error.status === 401 && this.#hasReread())) throw error;
      return await this.#askOnce(path, query, signal);
    }
  }

  /** Tokens and certificates in it are replaced by whoever renews them. */
  #hasReread(): boolean {
    if (this.#reread === undefined || performance.now() - this.#readAtMs < rereadMs) return false;
    this.#readAtMs = performance.now();
    try {
      const access = this.#reread();
      // What it shows now is for another server.
      if (new URL(access.getCurrentCluster()?.server ?? '').href !== this.#server.href) return false;
      this.#access = access;
      return true;
    } catch {
      return false; // it is being written, or is none: what was refused says enough
    }
  }

  /** The head of an answer that is no refusal. `signal` ends it, whatever of it has come. */
  async #askOnce(path: string, query: Readonly<Record<string, string>>, signal: AbortSignal): Promise<IncomingMessage> {
    const options: RequestOptions = { headers: { accept: 'application/json', 'user-agent': 'kvtier' } };
    await this.#access.applyToHTTPSOptions(options);
    const url = new URL(this.#server.pathname.replace(/\/$/, '') + path, this.#server);
    for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
    const response = await new Promise<IncomingMessage>((resolve, reject) => {
      const get = url.protocol === 'http:' ? httpGet : httpsGet;
      const request = get(url, { ...options, signal }, resolve);
      request.on('error', reject);
      request.on('socket', (socket) => socket.setKeepAlive(true, 5_000));
    });
    const { statusCode = 0, headers } = response;
    if (statusCode === 200) return response;
    const reason = reasonOf(await textOf(response, maxPageBytes).catch(() => ''));
    const seconds = Number(headers['retry-after'] ?? 0);
    const retryAfterMs = seconds > 0 ? Math.min(longestRetryAfterMs, seconds * 1_000) : 0;
    throw new ApiRefusal(statusCode, reason, retryAfterMs);
  }
}

async function textOf(response: IncomingMessage, maxBytes: number): Promise<string> {
  const chunks: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of response as AsyncIterable<Buffer>) {
    bytes += chunk.length;
    if (bytes > maxBytes) throw new KvError('PROTOCOL', `kubernetes: an answer of more than ${maxBytes} bytes`);
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString('utf8');
}

async function readLines(response: IncomingMessage, onLine: (value: unknown) => void): Promise<void> {
  let rest: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of response as AsyncIterable<Buffer>) {
    let from = 0;
    for (let end = chunk.indexOf(10); end !== -1; end = chunk.indexOf(10, from)) {
      const line = Buffer.concat([...rest, chunk.subarray(from, end)]).toString('utf8');
      [rest, bytes, from] = [[], 0, end + 1];
      if (line.trim() !== '') onLine(JSON.parse(line) as unknown);
    }
    bytes += chunk.length - from;
    if (bytes > maxLineBytes) throw new KvError('PROTOCOL', `kubernetes: a line of more than ${maxLineBytes} bytes`);
    if (from < chunk.length) rest.push(chunk.subarray(from));
  }
  if (bytes > 0) throw new KvError('PROTOCOL', 'kubernetes: a watch was cut off in a line');
}

/** Of a `Status`, or the first words of something else. */
function reasonOf(text: string): string {
  let reason = text;
  try {
    const { message } = JSON.parse(text) as { message?: unknown };
    if (typeof message === 'string') reason = message;
  } catch {
    // No JSON: a proxy speaks.
  }
  return reason.replaceAll(/\s+/g, ' ').trim().slice(0, maxReasonLength);
}

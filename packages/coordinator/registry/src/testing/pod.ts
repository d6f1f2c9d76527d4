/** An HTTP server with as much of vLLM's or SGLang's API as a coordinator sees: tests say what it has to do, and what it answers. */
import { createServer, type IncomingMessage, type Server, type ServerResponse } from 'node:http';
import { createServer as createTlsServer, type ServerOptions } from 'node:https';
import { freePort } from '../../../../../infra/ports.ts';

export interface PodFigures {
  waiting: number;
  running: number;
  usedShare: number;
}

export interface PodRequest {
  readonly path: string;
  readonly headers: IncomingMessage['headers'];
  readonly body: string;
  readonly response: ServerResponse;
  /** Its client left before it was answered. */
  readonly left: Promise<void>;
}

export class Pod {
  readonly kind: 'vllm' | 'sglang';
  figures: PodFigures = { waiting: 0, running: 0, usedShare: 0 };
  model = 'demo';
  /** Lines put in front of its metrics. */
  extra = '';
  /** Instead of its own; undefined: its own. */
  metrics: (() => string) | undefined;
  /** Of vLLM: `--prefix-caching-hash-algo`. */
  hashAlgorithm = 'sha256_cbor';
  models: (() => string) | undefined;
  startedAt = 1_700_000_000.25;
  /** Of SGLang; 0: it does not know yet. */
  pageTokens = 64;
  awake = true;
  healthy = true;
  token: string | undefined;
  /** It takes connections and answers nothing. */
  hangs = false;
  /** Of this path it knows nothing. */
  lacks: string | undefined;
  /** It answers everything but scrapes. */
  metricsHang = false;
  readonly seen: PodRequest[] = [];
  scrapes = 0;
  answer: (request: PodRequest) => void = () => {};
  #server: Server | undefined;
  #port = 0;

  readonly #tls: ServerOptions | undefined;

  constructor(kind: 'vllm' | 'sglang' = 'vllm', tls?: ServerOptions) {
    this.kind = kind;
    this.#tls = tls;
  }

  get address(): string {
    return `${this.#tls ? 'https' : 'http'}://127.0.0.1:${this.#port}`;
  }

  /** On the port that it had before, if it had one. */
  async start(): Promise<void> {
    const serve = (request: IncomingMessage, response: ServerResponse): void => void this.#serve(request, response);
    const server = this.#tls ? createTlsServer(this.#tls, serve) : createServer(serve);
    this.#server = server;
    this.#port ||= await freePort(); // one that the kernel gives would be another's while it is stopped
    await new Promise<void>((resolve, reject) => {
      server.once('error', reject);
      server.listen(this.#port, '127.0.0.1', resolve);
    });
  }

  async stop(): Promise<void> {
    const server = this.#server;
    this.#server = undefined;
    server?.closeAllConnections();
    await new Promise<void>((resolve) => (server ? server.close(() => resolve()) : resolve()));
  }

  async #serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    if (this.hangs) return;
    if (this.token !== undefined && request.headers.authorization !== `Bearer ${this.token}`)
      return void response.writeHead(401).end();
    const path = request.url!;
    if (path === this.lacks) return void response.writeHead(404).end();
    if (request.method === 'GET') {
      if (path === '/health') return void response.writeHead(this.healthy ? 200 : 503).end();
      if (path === '/v1/models') return void response.end(this.models?.() ?? this.#models());
      if (path !== '/metrics') return void response.writeHead(404).end();
      this.scrapes++;
      if (this.metricsHang) return;
      return void response.end(this.metrics?.() ?? this.extra + (this.kind === 'vllm' ? this.#vllm() : this.#sglang()));
    }
    let body = '';
    for await (const part of request.setEncoding('utf8')) body += part;
    const left = new Promise<void>((resolve) => response.once('close', () => !response.writableFinished && resolve()));
    const seen = { path, headers: request.headers, body, response, left };
    this.seen.push(seen);
    this.answer(seen);
  }

  #models(): string {
    const card = { id: this.model, object: 'model', created: 1, owned_by: this.kind, max_model_len: 8_192 };
    return JSON.stringify({ object: 'list', data: [card] });
  }

  #vllm(): string {
    const { waiting, running, usedShare } = this.figures;
    const of = `engine="0",model_name="${this.model}"`;
    return `# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds ${this.startedAt}
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{${of}} ${running.toFixed(1)}
vllm:num_requests_waiting{${of}} ${waiting.toFixed(1)}
vllm:num_requests_waiting_by_reason{${of},reason="capacity"} ${waiting.toFixed(1)}
vllm:engine_sleep_state{${of},sleep_state="awake"} ${this.awake ? '1.0' : '0.0'}
vllm:engine_sleep_state{${of},sleep_state="weights_offloaded"} ${this.awake ? '0.0' : '1.0'}
vllm:engine_sleep_state{${of},sleep_state="discard_all"} 0.0
vllm:kv_cache_usage_perc{${of}} ${usedShare}
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",prefix_caching_hash_algo="${this.hashAlgorithm}"} 1.0
`;
  }

  #sglang(): string {
    const { waiting, running, usedShare } = this.figures;
    const of = `engine_type="unified",model_name="${this.model}",tp_rank="0"`;
    return `# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{${of}} ${running}
sglang:num_queue_reqs{${of}} ${waiting}
sglang:token_usage{${of}} ${usedShare}
sglang:page_size{${of}} ${this.pageTokens.toFixed(1)}
sglang:num_pages{${of}} ${this.pageTokens > 0 ? '500.0' : '0.0'}
`;
  }
}

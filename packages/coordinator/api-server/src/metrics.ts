/** The API server's own metrics, `kvtier_request_*`; /metrics gives them followed by those of the workers. */
import { KvError } from '@kvtier/errors';
import type { Usage } from '@kvtier/registry';
import { pauseBuckets, processMetrics } from '@kvtier/telemetry/metrics';
import { Counter, Gauge, Histogram, Registry } from 'prom-client';
import type { Engines } from './engines.ts';
import type { Totals } from './plan.ts';

const secondsBuckets = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120];

export class RequestMetrics {
  readonly #registry = new Registry();
  readonly #registers = [this.#registry];
  readonly requests = new Counter({
    name: 'kvtier_requests_total',
    help: 'HTTP requests answered, by route and status (499: the client ended it, 502: cut after it had begun)',
    labelNames: ['route', 'status'] as const,
    registers: this.#registers,
  });
  readonly running = new Gauge({
    name: 'kvtier_requests_running',
    help: 'Answers being generated now',
    registers: this.#registers,
  });
  readonly expecting = new Gauge({
    name: 'kvtier_requests_expecting',
    help: 'Requests that wait for a worker which is away and expected in a moment',
    registers: this.#registers,
  });
  readonly firstTokenSeconds = new Histogram({
    name: 'kvtier_request_time_to_first_token_seconds',
    help: 'From the request’s arrival to its first token',
    buckets: secondsBuckets,
    registers: this.#registers,
  });
  readonly pauseSeconds = new Histogram({
    name: 'kvtier_request_time_between_tokens_seconds',
    help: 'From what brings tokens of an answer to what brings the next; of pods between the pieces of a stream',
    buckets: pauseBuckets,
    registers: this.#registers,
  });
  readonly requestSeconds = new Histogram({
    name: 'kvtier_request_seconds',
    help: 'From the request’s arrival to its last token',
    buckets: secondsBuckets,
    registers: this.#registers,
  });
  readonly #promptTokens = new Counter({
    name: 'kvtier_request_prompt_tokens_total',
    help: 'Tokens of prompts',
    registers: this.#registers,
  });
  readonly #completionTokens = new Counter({
    name: 'kvtier_request_completion_tokens_total',
    help: 'Tokens of answers',
    registers: this.#registers,
  });
  readonly #cachedTokens = new Counter({
    name: 'kvtier_request_cached_tokens_total',
    help: 'Tokens of prompts that were not computed, by the tier they came from',
    labelNames: ['tier'] as const,
    registers: this.#registers,
  });
  readonly #retries = new Counter({
    name: 'kvtier_request_retries_total',
    help: 'Answers that were tried at another worker, by the code of the failure',
    labelNames: ['code'] as const,
    registers: this.#registers,
  });
  readonly moves = new Counter({
    name: 'kvtier_request_moves_total',
    help: 'Answers that had begun and went on at another worker',
    registers: this.#registers,
  });
  readonly rereads = new Counter({
    name: 'kvtier_request_tokenizer_rereads_total',
    help: 'Requests for which a tokenizer was read anew, as those of all models do not fit into the memory of the threads that read texts',
    registers: this.#registers,
  });
  readonly engineUp = new Gauge({
    name: 'kvtier_request_engine_up',
    help: '1 while an engine worker serves',
    registers: this.#registers,
  });
  readonly workers = new Gauge({
    name: 'kvtier_request_workers',
    help: 'Workers that are known, by state',
    labelNames: ['state'] as const,
    registers: this.#registers,
  });

  constructor() {
    processMetrics('api_server', this.#registry);
  }

  countRetry(error: unknown): void {
    this.#retries.inc({ code: error instanceof KvError ? error.code : 'unknown' });
  }

  countTokens(totals: Totals): void {
    this.#promptTokens.inc(totals.promptTokens);
    this.#completionTokens.inc(totals.completionTokens);
    for (const [tier, tokens] of Object.entries(totals.tokensByTier)) this.#cachedTokens.inc({ tier }, tokens);
  }

  /** As a pod's answer says it: where cached tokens came from it does not tell. */
  countUsage({ promptTokens, completionTokens, cachedTokens }: Usage): void {
    this.#promptTokens.inc(promptTokens);
    this.#completionTokens.inc(completionTokens);
    if (cachedTokens > 0) this.#cachedTokens.inc({ tier: 'pod' }, cachedTokens);
  }

  /** Prometheus' text form. */
  async text(engines: Pick<Engines, 'workers'>): Promise<string> {
    this.workers.reset();
    let serving = 0;
    for (const worker of engines.workers()) {
      if (worker === undefined) continue;
      this.workers.inc({ state: worker.state });
      if (worker.state === 'ready') serving++;
    }
    this.engineUp.set(serving > 0 ? 1 : 0);
    return this.#registry.metrics();
  }
}

export const metricsContentType = Registry.PROMETHEUS_CONTENT_TYPE;

/** The endpoint picker's own metrics, `kvtier_picker_*`. */
import type { Usage } from '@kvtier/registry';
import { Counter, Gauge, Histogram, Registry, secondsBuckets } from '@kvtier/telemetry/metrics';
import type { Outcome } from './refusal.ts';

/** Why a request was routed by load alone. */
export type Unread = 'no_body' | 'too_large' | 'not_sent' | 'not_understood';

export class PickerMetrics {
  readonly #registry = new Registry();
  readonly #registers = [this.#registry];
  readonly #requests = new Counter({
    name: 'kvtier_picker_requests_total',
    help: 'Requests of gateways, by what became of them',
    labelNames: ['outcome'] as const,
    registers: this.#registers,
  });
  readonly #unread = new Counter({
    name: 'kvtier_picker_unread_total',
    help: 'Requests that were routed by load alone, by why their prompt was not read',
    labelNames: ['reason'] as const,
    registers: this.#registers,
  });
  readonly #tokens = new Counter({
    name: 'kvtier_picker_tokens_total',
    help: 'Tokens by the answers’ usage: of prompts, of these cached, of answers',
    labelNames: ['kind'] as const,
    registers: this.#registers,
  });
  readonly elsewhere = new Counter({
    name: 'kvtier_picker_elsewhere_total',
    help: 'Requests that another endpoint served than the one that was chosen first',
    registers: this.#registers,
  });
  readonly seconds = new Histogram({
    name: 'kvtier_picker_seconds',
    help: 'From the end of a request to the choice, waiting for a worker included',
    buckets: secondsBuckets,
    registers: this.#registers,
  });
  readonly streams = new Gauge({
    name: 'kvtier_picker_streams',
    help: 'Streams of gateways that are open, one a request',
    registers: this.#registers,
  });
  readonly heldBytes = new Gauge({
    name: 'kvtier_picker_held_bytes',
    help: 'Bytes of bodies that wait for a choice',
    registers: this.#registers,
  });

  count(outcome: Outcome): void {
    this.#requests.inc({ outcome });
  }

  countUnread(reason: Unread): void {
    this.#unread.inc({ reason });
  }

  countUsage({ promptTokens, cachedTokens, completionTokens }: Usage): void {
    this.#tokens.inc({ kind: 'prompt' }, promptTokens);
    this.#tokens.inc({ kind: 'cached' }, cachedTokens);
    this.#tokens.inc({ kind: 'completion' }, completionTokens);
  }

  /** Prometheus' text form. */
  text(): Promise<string> {
    return this.#registry.metrics();
  }
}

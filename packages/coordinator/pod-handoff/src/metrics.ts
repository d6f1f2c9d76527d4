/** What became of requests that could be split over two pods, `kvtier_pod_handoff_*`. */
import { Counter, Histogram, Registry, secondsBuckets } from '@kvtier/telemetry/metrics';

/** Why no prefill pod computed a prompt that one was wanted for. */
export type HandOffReason = 'nobody' | 'busy' | 'failed' | 'refused' | 'nonsense' | 'timeout' | 'revision' | 'spent';

export class PodHandOffMetrics {
  readonly #registry = new Registry();
  readonly #registers = [this.#registry];
  readonly #decisions = new Counter({
    name: 'kvtier_pod_handoff_decisions_total',
    help: 'Requests for pods of which some only prefill, by what was decided and why',
    labelNames: ['decision', 'reason'] as const,
    registers: this.#registers,
  });
  readonly #fallbacks = new Counter({
    name: 'kvtier_pod_handoff_fallbacks_total',
    help: 'Prompts that the decode pod computed itself although a prefill pod was wanted, by reason',
    labelNames: ['reason'] as const,
    registers: this.#registers,
  });
  readonly prefillSeconds = new Histogram({
    name: 'kvtier_pod_handoff_prefill_seconds',
    help: 'Prefill legs, waiting for a pod included, however they ended',
    buckets: secondsBuckets,
    registers: this.#registers,
  });

  decided(split: boolean, reason: string): void {
    this.#decisions.inc({ decision: split ? 'split' : 'none', reason });
  }

  fellBack(reason: HandOffReason): void {
    this.#fallbacks.inc({ reason });
  }

  /** In Prometheus' text form. */
  text(): Promise<string> {
    return this.#registry.metrics();
  }
}

/** What was decided, why, how it was predicted and how it turned out. */
import { Counter, Gauge, Histogram, Registry } from 'prom-client';
import type { Decision, Split } from './decision.ts';

const seconds = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30];

export class HandOffMetrics {
  readonly #registry = new Registry();
  readonly #registers = [this.#registry];
  readonly #decisions = new Counter({
    name: 'kvtier_handoff_decisions_total',
    help: 'Requests by whether their prompt was computed by another worker, and why',
    labelNames: ['decision', 'reason'] as const,
    registers: this.#registers,
  });
  readonly #shortfalls = new Counter({
    name: 'kvtier_handoff_shortfalls_total',
    help: 'Hand-offs that were wanted and did not happen, or fell short, by why',
    labelNames: ['reason'] as const,
    registers: this.#registers,
  });
  readonly #refused = new Counter({
    name: 'kvtier_handoff_refused_total',
    help: 'Requests refused before anything was computed for them, by why',
    labelNames: ['reason'] as const,
    registers: this.#registers,
  });
  readonly #firstToken = new Histogram({
    name: 'kvtier_handoff_first_token_seconds',
    help: 'From the decision to the first token, as predicted and as seen',
    labelNames: ['decision', 'what'] as const,
    buckets: seconds,
    registers: this.#registers,
  });
  readonly #pauses = new Histogram({
    name: 'kvtier_handoff_pause_seconds',
    help: 'From a first token that the prefill worker gave to the next one, as predicted and as seen',
    labelNames: ['what'] as const,
    buckets: seconds,
    registers: this.#registers,
  });
  readonly #blocks = new Counter({
    name: 'kvtier_handoff_blocks_total',
    help: 'Blocks of hand-offs: asked for, held by the decode worker itself, come to it before its first token, and of these before all were computed',
    labelNames: ['what'] as const,
    registers: this.#registers,
  });

  constructor(legs: () => number) {
    new Gauge({
      name: 'kvtier_handoff_legs',
      help: 'Prompts that are computed for another worker now',
      registers: this.#registers,
      collect() {
        this.set(legs());
      },
    });
  }

  decided({ split, reason }: Decision): void {
    this.#decisions.inc({ decision: nameOf(split), reason });
  }

  came({ split }: Decision, predictedS: number, seenS: number): void {
    this.#firstToken.observe({ decision: nameOf(split), what: 'predicted' }, predictedS);
    this.#firstToken.observe({ decision: nameOf(split), what: 'seen' }, seenS);
  }

  paused(predictedS: number, seenS: number): void {
    this.#pauses.observe({ what: 'predicted' }, predictedS);
    this.#pauses.observe({ what: 'seen' }, seenS);
  }

  handedOff({ blocks }: Split, local: number, come: number, hidden: number): void {
    this.#blocks.inc({ what: 'asked' }, blocks);
    this.#blocks.inc({ what: 'held' }, local);
    this.#blocks.inc({ what: 'come' }, come);
    this.#blocks.inc({ what: 'hidden' }, hidden);
  }

  fellShort(reason: string): void {
    this.#shortfalls.inc({ reason });
  }

  refused(reason: 'late' | 'no-prefill-worker'): void {
    this.#refused.inc({ reason });
  }

  /** In Prometheus' text form. */
  text(): Promise<string> {
    return this.#registry.metrics();
  }
}

const nameOf = (split: Split | undefined): 'split' | 'none' => (split === undefined ? 'none' : 'split');

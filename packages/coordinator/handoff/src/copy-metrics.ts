/** What was copied ahead, why, and what became of it. */
import type { Budget, CopyEnd } from '@kvtier/routing';
import { Counter, Gauge, Registry } from 'prom-client';

export class CopyMetrics {
  readonly #registry = new Registry();
  readonly #copies = new Counter({
    name: 'kvtier_copies_total',
    help: 'Prefixes copied ahead to another worker that have ended, by why, and by how they ended',
    labelNames: ['why', 'outcome'] as const,
    registers: [this.#registry],
  });

  constructor(budget: Pick<Budget, 'underWay' | 'bytes'>) {
    new Gauge({
      name: 'kvtier_copies_under_way',
      help: 'Prefixes that are copied ahead now',
      registers: [this.#registry],
      collect() {
        this.set(budget.underWay);
      },
    });
    let counted = 0;
    new Counter({
      name: 'kvtier_copies_bytes_total',
      help: 'KV bytes of the prefixes that were copied ahead, late ones among them',
      registers: [this.#registry],
      collect() {
        this.inc(budget.bytes - counted);
        counted = budget.bytes;
      },
    });
  }

  ended(why: 'hot' | 'new', outcome: CopyEnd): void {
    this.#copies.inc({ why, outcome });
  }

  /** In Prometheus' text form. */
  text(): Promise<string> {
    return this.#registry.metrics();
  }
}

/** The coordinator's metrics beside those of its API server: workers, the queue in front of them, and the KV indexes. */
import type { Dispatcher } from '@kvtier/dispatch';
import { feedMetrics } from '@kvtier/kv-index';
import { type Fleet, fleetMetrics } from '@kvtier/registry';
import { Gauge, Registry } from 'prom-client';
import type { Indexes } from './indexes.ts';

export interface MetricsParts {
  readonly dispatch: Pick<Dispatcher, 'stats'>;
  readonly indexes: Pick<Indexes, 'state' | 'past'>;
  readonly fleet: Fleet;
}

export class CoordinatorMetrics {
  readonly #registry = new Registry();

  constructor({ dispatch, indexes, fleet }: MetricsParts) {
    fleetMetrics(fleet, this.#registry);
    feedMetrics(
      () => Object.values(indexes.state()),
      () => indexes.past(),
      this.#registry,
    );
    new Gauge({
      name: 'kvtier_dispatch_requests',
      help: 'waiting: in front of the workers; given: at a worker; chosen, saturated: so far',
      labelNames: ['what'] as const,
      registers: [this.#registry],
      collect() {
        const { policy: _, policyBytes: __, ...counts } = dispatch.stats();
        for (const [what, count] of Object.entries(counts)) this.set({ what }, count);
      },
    });
    new Gauge({
      name: 'kvtier_dispatch_policy_bytes',
      help: 'Memory of what the routing policy keeps of its own',
      registers: [this.#registry],
      collect() {
        this.set(dispatch.stats().policyBytes);
      },
    });
  }

  /** In Prometheus' text form. */
  text(): Promise<string> {
    return this.#registry.metrics();
  }
}

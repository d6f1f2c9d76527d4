/** The coordinator's metrics beside those of its API server: the queue in front of the workers, and the KV indexes. */
import type { Dispatcher } from '@kvtier/dispatch';
import { Gauge, Registry } from 'prom-client';
import type { Indexes } from './indexes.ts';

export class CoordinatorMetrics {
  readonly #dispatch: Pick<Dispatcher, 'stats'>;
  readonly #indexes: Pick<Indexes, 'state'>;
  readonly #registry = new Registry();
  readonly #registers = [this.#registry];
  readonly #requests = new Gauge({
    name: 'kvtier_dispatch_requests',
    help: 'waiting: in front of the workers; given: at a worker; chosen, saturated: so far',
    labelNames: ['what'] as const,
    registers: this.#registers,
  });
  readonly #bytes = new Gauge({
    name: 'kvtier_index_bytes',
    help: 'Memory of the KV index',
    labelNames: ['model'] as const,
    registers: this.#registers,
  });
  readonly #maxBytes = new Gauge({
    name: 'kvtier_index_max_bytes',
    help: 'Its bound',
    labelNames: ['model'] as const,
    registers: this.#registers,
  });
  readonly #blocks = new Gauge({
    name: 'kvtier_index_blocks',
    help: 'Blocks that the KV index knows',
    labelNames: ['model'] as const,
    registers: this.#registers,
  });
  readonly #guessed = new Gauge({
    name: 'kvtier_index_guessed_workers',
    help: 'Workers whose blocks are guessed from what they were sent, for want of events',
    labelNames: ['model'] as const,
    registers: this.#registers,
  });
  readonly #events = new Gauge({
    name: 'kvtier_index_events',
    help: 'What happened to the KV events that the index follows, so far',
    labelNames: ['model', 'what'] as const,
    registers: this.#registers,
  });

  constructor(dispatch: Pick<Dispatcher, 'stats'>, indexes: Pick<Indexes, 'state'>) {
    this.#dispatch = dispatch;
    this.#indexes = indexes;
  }

  /** In Prometheus' text form. */
  text(): Promise<string> {
    const { policy: _, ...counts } = this.#dispatch.stats();
    for (const [what, count] of Object.entries(counts)) this.#requests.set({ what }, count);
    for (const gauge of [this.#bytes, this.#maxBytes, this.#blocks, this.#guessed, this.#events]) gauge.reset();
    for (const [model, state] of Object.entries(this.#indexes.state())) {
      const { index, maxBytes, namesBytes, workers, lies, gaps, restarts, snapshots } = state;
      this.#bytes.set({ model }, index.bytes + namesBytes);
      this.#maxBytes.set({ model }, maxBytes);
      this.#blocks.set({ model }, index.blocks);
      this.#guessed.set({ model }, workers.filter(({ why }) => why !== undefined).length);
      const { droppedBlocks, unknownRemovals, conflicts } = index;
      const told = { gaps, restarts, snapshots, droppedBlocks, unknownRemovals, conflicts, ...lies };
      for (const [what, count] of Object.entries(told)) this.#events.set({ model, what }, count);
    }
    return this.#registry.metrics();
  }
}

/** What the fleet tells of its workers, `kvtier_worker_*`: read when somebody asks. Workers beyond the first names are one, "other". */
import { Counter, Gauge, type Registry } from '@kvtier/telemetry/metrics';
import type { Fleet } from './fleet.ts';
import type { Worker, WorkerState } from './worker.ts';

/** Values of the label `worker`. */
const maxNames = 256;
const states: readonly WorkerState[] = ['joining', 'ready', 'draining', 'silent', 'refused'];

/** Registers them, once per registry. */
export function fleetMetrics(fleet: Fleet, registry: Registry): void {
  const registers = [registry];
  const eachWorker = (gauge: Gauge<'worker'>, read: (worker: Worker) => number): void => {
    gauge.reset();
    for (const worker of fleet.workers()) if (worker) gauge.inc({ worker: nameOf(worker) }, read(worker));
  };
  new Gauge({
    name: 'kvtier_worker_state',
    help: '1 for the state that a worker is in',
    labelNames: ['worker', 'state'] as const,
    registers,
    collect() {
      this.reset();
      for (const worker of fleet.workers()) if (worker) this.inc({ worker: nameOf(worker), state: worker.state });
    },
  });
  new Gauge({
    name: 'kvtier_workers',
    help: 'Workers that discovery knows, by state',
    labelNames: ['state'] as const,
    registers,
    collect() {
      for (const state of states) this.set({ state }, fleet.workers().filter((one) => one?.state === state).length);
    },
  });
  new Gauge({
    name: 'kvtier_worker_waiting',
    help: 'Requests without their first token, as the worker told, with what was sent since',
    labelNames: ['worker'] as const,
    registers,
    collect() {
      eachWorker(this, ({ load }) => load.waiting);
    },
  });
  new Gauge({
    name: 'kvtier_worker_running',
    help: 'Requests that are given tokens',
    labelNames: ['worker'] as const,
    registers,
    collect() {
      eachWorker(this, ({ load }) => load.running);
    },
  });
  new Gauge({
    name: 'kvtier_worker_tokens_ahead',
    help: 'Tokens that the worker has still to compute, with what was sent since it told',
    labelNames: ['worker'] as const,
    registers,
    collect() {
      eachWorker(this, ({ load }) => load.tokensAhead);
    },
  });
  new Gauge({
    name: 'kvtier_worker_prefill_tokens_per_second',
    help: 'Prompt tokens that the worker computes in a second: measured, or assumed as is usual for its model',
    labelNames: ['worker', 'rate'] as const,
    registers,
    collect() {
      this.reset();
      for (const worker of fleet.workers())
        if (worker?.state === 'ready' && worker.number < maxNames)
          this.set({ worker: nameOf(worker), rate: worker.prefillRate ?? 'assumed' }, worker.load.prefillTokensPerS);
    },
  });
  new Gauge({
    name: 'kvtier_worker_used_blocks',
    help: 'KV blocks that something holds',
    labelNames: ['worker'] as const,
    registers,
    collect() {
      eachWorker(this, ({ load }) => load.usedBlocks);
    },
  });
  new Gauge({
    name: 'kvtier_worker_told_age_seconds',
    help: 'Since the last word of a worker’s load',
    labelNames: ['worker'] as const,
    registers,
    collect() {
      this.reset();
      const nowMs = performance.now();
      for (const worker of fleet.workers())
        if (worker && worker.load.toldAtMs > 0 && worker.number < maxNames)
          this.set({ worker: nameOf(worker) }, (nowMs - worker.load.toldAtMs) / 1_000);
    },
  });
  new Counter({
    name: 'kvtier_worker_events_total',
    help: 'Workers that became ready, were lost, were refused, or were found to be started anew',
    labelNames: ['event'] as const,
    registers,
    collect() {
      this.reset();
      for (const [event, count] of Object.entries(fleet.counts)) this.inc({ event }, count);
    },
  });
  new Gauge({
    name: 'kvtier_discovery_stale',
    help: '1 while discovery cannot say who is there now',
    registers,
    collect() {
      this.set(fleet.discoveryProblem === undefined ? 0 : 1);
    },
  });
}

const nameOf = ({ number, record }: Worker): string => (number < maxNames ? record.name : 'other');

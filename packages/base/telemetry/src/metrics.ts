/** Metrics in Prometheus' form. A registry belongs to whoever makes it: there is no global one. */
import { native } from '@kvtier/data-plane';
import { Counter, Gauge, Histogram, Registry } from 'prom-client';
import { refusedFiles, refusedRenewals } from './renewed.ts';
import { version } from './version.ts';

export { Counter, Gauge, Histogram, Registry };

/** From a cache hit in memory to a long prompt on a slow machine. */
export const secondsBuckets = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120];

/** Between two tokens of an answer: fine where a reader feels the difference. */
export const pauseBuckets = [
  ...[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75],
  ...[1, 2.5, 5, 10, 30],
];

/**
 * Of this process, `kvtier_PREFIX_…`: how long its event loop lets others wait, since it is ready (see runService), by its thread's CPU
 * time; its memory; renewed files that it could not use; and its version.
 */
export function processMetrics(prefix: string, registry: Registry): void {
  new Gauge({
    name: `kvtier_${prefix}_build_info`,
    help: '1: the version that runs',
    labelNames: ['version'] as const,
    registers: [registry],
  }).set({ version }, 1);
  new Gauge({
    name: `kvtier_${prefix}_longest_turn_seconds`,
    help: 'CPU time of the longest turn of the event loop since the process is ready',
    registers: [registry],
    collect() {
      this.set(native.turnsSeen().longestCpuMs / 1_000);
    },
  });
  new Gauge({
    name: `kvtier_${prefix}_resident_bytes`,
    help: 'Memory of the process, as the system counts it',
    registers: [registry],
    collect() {
      this.set(process.memoryUsage.rss());
    },
  });
  new Counter({
    name: `kvtier_${prefix}_long_turns_total`,
    help: 'Turns of the event loop with more than 50 ms of CPU time since the process is ready',
    registers: [registry],
    collect() {
      this.reset();
      this.inc(native.turnsSeen().longTurns);
    },
  });
  new Counter({
    name: `kvtier_${prefix}_renewals_refused_total`,
    help: 'Renewed files (certificates, keys, secrets) that could not be used, so that those before stay in use',
    registers: [registry],
    collect() {
      this.reset();
      this.inc(refusedRenewals());
    },
  });
  new Gauge({
    name: `kvtier_${prefix}_refused_files`,
    help: 'Files (certificates, keys, secrets) that cannot be used as they are now, so that those before stay in use',
    registers: [registry],
    collect() {
      this.set(refusedFiles());
    },
  });
}

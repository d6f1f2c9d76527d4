/** Metrics in Prometheus' form. A registry belongs to whoever makes it: there is no global one. */
import { Counter, Gauge, Histogram, Registry } from 'prom-client';

export { Counter, Gauge, Histogram, Registry };

/** From a cache hit in memory to a long prompt on a slow machine. */
export const secondsBuckets = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120];

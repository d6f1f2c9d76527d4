export { createLogger, type Logger } from './log.ts';
export { Counter, Gauge, Histogram, Registry, secondsBuckets } from './metrics.ts';
export { type RunningService, runService } from './service.ts';

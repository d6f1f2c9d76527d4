export { bundleOf, checkout } from './bundles.ts';
export { stderrSink } from './line-sink.ts';
export { createLogger, type Logger, serviceLogger } from './log.ts';
export { refusedFiles, refusedRenewals, tellRenewed } from './renewed.ts';
export { type Check, type Checks, endProcess, endProcessAfter, type RunningService, runService } from './service.ts';
export type { ServiceArguments } from './service-arguments.ts';
export { traceparentOf } from './traceparent.ts';

export { bundleOf, checkout } from './bundles.ts';
export { LineSink, stderrSink } from './line-sink.ts';
export { createLogger, type Logger } from './log.ts';
export { refusedRenewals, tellRenewed } from './renewed.ts';
export { endProcess, endProcessAfter, type RunningService, runService } from './service.ts';
export { traceparentOf } from './traceparent.ts';

export { createLogger, type Logger } from './log.ts';
export { type RunningService, runService } from './service.ts';

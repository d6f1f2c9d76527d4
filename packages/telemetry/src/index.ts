export { createLogger, type Logger } from './log.ts';
export { runService, type RunningService } from './service.ts';

/** Structured logs, one JSON object a line on stderr, so that stdout stays free for what a person asked for. */
import { pino } from 'pino';
import { stderrSink } from './line-sink.ts';
import { version } from './version.ts';

export type Logger = Pick<pino.Logger, 'trace' | 'debug' | 'info' | 'warn' | 'error' | 'fatal'>;

/** Never waits for whoever reads (see LineSink). */
export function createLogger(name: string, level: string): Logger {
  return pino({ name, level, base: { pid: process.pid } }, stderrSink());
}

/** A service's: its first line says which version starts. */
export function serviceLogger(name: string, level: string): Logger {
  const logger = createLogger(name, level);
  logger.info({ version, node: process.version }, 'starts');
  return logger;
}

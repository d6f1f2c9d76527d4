/** Structured logs, one JSON object a line on stderr, so that stdout stays free for what a person asked for. */
import { pino } from 'pino';
import { stderrSink } from './line-sink.ts';

export type Logger = Pick<pino.Logger, 'trace' | 'debug' | 'info' | 'warn' | 'error' | 'fatal'>;

/** Never waits for whoever reads (see LineSink). */
export function createLogger(name: string, level: string): Logger {
  return pino({ name, level, base: { pid: process.pid } }, stderrSink());
}

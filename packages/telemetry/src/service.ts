/**
 * The life of a service process: start, say "ready" to the supervisor (Node IPC, when there is one), run until SIGTERM,
 * SIGINT or until the supervisor is gone, close in order. A failure at start is one line on stderr and exit code 1.
 */
import { KvError } from '@kvtier/errors';

/** The supervisor kills what has not closed by then; leave a little earlier by ourselves. */
const closeDeadlineMs = 8_000;

export interface RunningService {
  /** Told to the supervisor as {ready: ...}: addresses and the like. */
  readonly ready: Readonly<Record<string, unknown>>;
  close(): Promise<void>;
}

export function runService(name: string, start: () => Promise<RunningService>): void {
  let running: RunningService | undefined;
  let closing = false;
  const stop = async (code: number): Promise<void> => {
    if (closing) return;
    closing = true;
    setTimeout(() => process.exit(code || 1), closeDeadlineMs).unref();
    try {
      await running?.close();
    } catch (error) {
      process.stderr.write(`${name}: while closing: ${(error as Error).message}\n`);
      code ||= 1;
    }
    process.exit(code);
  };
  process.on('SIGTERM', () => void stop(0));
  process.on('SIGINT', () => void stop(0));
  process.on('disconnect', () => void stop(0)); // the supervisor died: nobody is left to restart or reap us
  start().then(
    (service) => {
      running = service;
      process.send?.({ ready: service.ready });
      if (closing) void service.close().finally(() => process.exit(0));
    },
    (error: unknown) => {
      const failure = KvError.from(error, 'SETUP');
      process.stderr.write(`${name}: ${failure.code}: ${failure.message}\n`);
      process.exit(1);
    },
  );
}

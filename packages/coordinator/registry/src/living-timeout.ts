/**
 * How long an answer may be late while whoever owes it shows in other ways that it lives. A late answer alone says that somebody is busy; that a
 * connection is taken says nothing, as a kernel takes them for a process that stands still.
 */
import { runningTimeout } from '@kvtier/runtime';

export interface Patience {
  /** Without any sign of life. */
  readonly silentMs: number;
  /** In all. */
  readonly mostMs: number;
  /** When the last sign of life came, on performance.now(). */
  readonly heardAtMs: () => number;
}

/** As `runningTimeout`, anew from each sign of life. `end` when it is not needed any more. */
export function livingTimeout({ silentMs, mostMs, heardAtMs }: Patience): ReturnType<typeof runningTimeout> {
  const cut = new AbortController();
  const beganMs = performance.now();
  let limit: ReturnType<typeof runningTimeout>;
  const wait = (ms: number): void => {
    limit = runningTimeout(ms);
    limit.signal.addEventListener('abort', () => {
      const leftMs = Math.min(heardAtMs() + silentMs, beganMs + mostMs) - performance.now();
      if (leftMs > 0) wait(leftMs);
      else cut.abort(limit.signal.reason);
    });
  };
  wait(Math.min(silentMs, mostMs));
  return { signal: cut.signal, end: () => limit.end() };
}

/**
 * Loaded into a process by --import: what its event loop's turns cost. A message to it is answered with the worst since the last
 * one, {cpuMs, waitMs}: CPU time of the main thread between two ticks, and the time for which it was ready and got no CPU (which is the
 * machine's doing, and not the process's).
 */
import { readFileSync } from 'node:fs';
import { isMainThread } from 'node:worker_threads';

const tickMs = 5;

export interface WorstTurns {
  readonly cpuMs: number;
  readonly waitMs: number;
}

/** Starts to look; returns what tells the worst and begins anew. */
export function watchTurns(): () => WorstTurns {
  const file = `/proc/${process.pid}/task/${process.pid}/schedstat`;
  const look = (): readonly number[] =>
    readFileSync(file, 'utf8')
      .split(' ', 2)
      .map((ns) => Number(ns) / 1e6);
  let last = look();
  let worst = { cpuMs: 0, waitMs: 0 };
  const tick = (): void => {
    const now = look();
    worst = {
      cpuMs: Math.max(worst.cpuMs, now[0]! - last[0]!),
      waitMs: Math.max(worst.waitMs, now[1]! - last[1]!),
    };
    last = now;
  };
  setInterval(tick, tickMs).unref();
  return () => {
    tick();
    const told = worst;
    worst = { cpuMs: 0, waitMs: 0 };
    return told;
  };
}

if (isMainThread && process.send !== undefined && process.env.KVTIER_WATCH_TURNS !== undefined) {
  const worst = watchTurns();
  process.on('message', () => process.send!({ turns: worst() }));
}

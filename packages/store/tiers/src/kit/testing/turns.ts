/**
 * How long the turns of this thread's event loop take. By its own CPU time, so that a busy machine does not count; in real time
 * beside it, as what waits (a call that blocks) does not show otherwise.
 */
import { readFileSync } from 'node:fs';

export interface Turns {
  /** Of the longest turn since the last call, milliseconds. */
  take(): { readonly cpuMs: number; readonly realMs: number };
  end(): void;
}

const cpuMs = (): number => Number(readFileSync('/proc/thread-self/schedstat', 'latin1').split(' ')[0]) / 1e6;

export function watchTurns(): Turns {
  let longest = { cpuMs: 0, realMs: 0 };
  let before = { cpuMs: cpuMs(), realMs: performance.now() };
  // In each turn that takes at least a millisecond.
  const timer = setInterval(() => {
    const now = { cpuMs: cpuMs(), realMs: performance.now() };
    longest = {
      cpuMs: Math.max(longest.cpuMs, now.cpuMs - before.cpuMs),
      realMs: Math.max(longest.realMs, now.realMs - before.realMs),
    };
    before = now;
  }, 1);
  return {
    take: () => {
      const taken = longest;
      longest = { cpuMs: 0, realMs: 0 };
      before = { cpuMs: cpuMs(), realMs: performance.now() };
      return taken;
    },
    end: () => clearInterval(timer),
  };
}

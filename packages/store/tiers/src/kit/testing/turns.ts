/** How long the turns of this thread's event loop take: by its own CPU time, and in real time, as what waits (a call that blocks) does not show otherwise. */
import { LongestTurn, threadUse } from '@kvtier/data-plane/testing';

export interface Turns {
  /** Of the longest turn since the last call, milliseconds. */
  take(): { readonly cpuMs: number; readonly realMs: number };
  end(): void;
}

export function watchTurns(): Turns {
  const now = () => ({ use: threadUse(), realMs: performance.now() });
  let [longest, longestRealMs] = [new LongestTurn(), 0];
  let before = now();
  // In each turn that takes at least a millisecond.
  const timer = setInterval(() => {
    const after = now();
    longest.add(before.use, after.use);
    longestRealMs = Math.max(longestRealMs, after.realMs - before.realMs);
    before = after;
  }, 1);
  return {
    take: () => {
      const taken = { cpuMs: longest.ms, realMs: longestRealMs };
      [longest, longestRealMs] = [new LongestTurn(), 0];
      before = now();
      return taken;
    },
    end: () => clearInterval(timer),
  };
}

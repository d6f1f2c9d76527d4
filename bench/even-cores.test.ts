/** A process on each processor that takes nobody's turn, gone when it is let go. */
import { readdirSync, readFileSync } from 'node:fs';
import { expect, it, vi } from 'vitest';
import { evenCores } from './even-cores.ts';
import { allowedProcessors } from './pinning.ts';

const schedIdle = '5';

/** Scheduling policies of our children, and where they may run. */
function children(): string[] {
  const found: string[] = [];
  for (const pid of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
      const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
      if (fields[0] === 'Z' || Number(fields[1]) !== process.pid) continue;
      const [, where] = /^Cpus_allowed_list:\s*(\S+)$/m.exec(readFileSync(`/proc/${pid}/status`, 'latin1'))!;
      if (fields[38] === schedIdle) found.push(where!);
    } catch {
      // it has just ended
    }
  }
  return found.sort();
}

it('computes on each processor when nobody else does', { timeout: 30_000 }, async () => {
  const end = evenCores();
  try {
    const all = allowedProcessors().map(String).sort();
    await vi.waitUntil(() => children().length === all.length, { timeout: 20_000 });
    expect(children()).toEqual(all);
  } finally {
    end();
  }
  await vi.waitUntil(() => children().length === 0, { timeout: 20_000 });
});

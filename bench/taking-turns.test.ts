/** Turns of real processes: only one runs at a time, and each is charged for its own. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface, type Interface } from 'node:readline';
import { afterEach, expect, it } from 'vitest';
import { takeTurns } from './taking-turns.ts';

const children: ChildProcess[] = [];
afterEach(() => {
  for (const child of children.splice(0)) child.kill('SIGKILL');
});

/** Asked by a line, works for so many ms of CPU time, and answers with the milliseconds of the clock in which it ran. */
async function worker(cpuMs: number): Promise<{ child: ChildProcess; lines: Interface }> {
  const program = `
    console.log('ready');
    process.stdin.once('data', () => {
      const seen = new Set(), start = process.cpuUsage();
      for (;;) {
        seen.add(Date.now());
        const { user, system } = process.cpuUsage(start);
        if (user + system > ${cpuMs * 1000}) break;
      }
      console.log(JSON.stringify([...seen]));
    });`;
  const child = spawn(process.execPath, ['-e', program], { stdio: ['pipe', 'pipe', 'inherit'] });
  children.push(child);
  const lines = createInterface({ input: child.stdout! });
  await once(lines, 'line');
  return { child, lines };
}

it('processes run one at a time, and what each ran is what its answer took', async () => {
  const answers: number[][] = [];
  const runners = await Promise.all(
    [150, 300].map(async (cpuMs, index) => {
      const { child, lines } = await worker(cpuMs);
      const ask = async (): Promise<number> => {
        const startMs = performance.now();
        child.stdin!.write('go\n');
        const [line] = (await once(lines, 'line')) as [string];
        answers[index] = JSON.parse(line) as number[];
        return performance.now() - startMs;
      };
      return { pids: [child.pid!], ask };
    }),
  );
  const startMs = performance.now();
  const ran = await takeTurns(runners);
  const wallMs = performance.now() - startMs;
  expect(ran[0]! + ran[1]!).toBeLessThanOrEqual(wallMs + 1);
  // A millisecond at either end of a slice may be seen by both. Others may want the processors: what it ran it need not have seen.
  for (const [i, seen] of answers.entries()) {
    const slices = Math.ceil(ran[i]! / 25) + 1;
    expect(slices).toBeGreaterThan(4);
    expect(seen.length).toBeLessThanOrEqual(ran[i]! + 2 * slices);
  }
  const shared = answers[0]!.filter((ms) => answers[1]!.includes(ms));
  expect(shared.length).toBeLessThanOrEqual(2 * (Math.ceil(ran[0]! / 25) + 1));
});

it('all go on when one fails', async () => {
  const { child, lines } = await worker(20);
  const failing = { pids: [child.pid!], ask: () => Promise.reject(new Error('no answer')) };
  await expect(takeTurns([failing])).rejects.toThrow('no answer');
  child.stdin!.write('go\n');
  await once(lines, 'line'); // it was not left stopped
});

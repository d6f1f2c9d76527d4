import { spawnSync } from 'node:child_process';
import { setTimeout as sleep, setImmediate as turn } from 'node:timers/promises';
import { beforeEach, describe, expect, it } from 'vitest';
import { native } from './index.ts';

const nowMs = (): number => Number(process.hrtime.bigint()) / 1e6;
/** Keeps this thread busy for so much of its own time. */
function spin(cpuMs: number): void {
  const end = native.threadCpuMs() + cpuMs;
  while (native.threadCpuMs() < end);
}

describe('turns of the event loop', () => {
  beforeEach(() => native.watchTurns());

  it('are measured by the time that the thread computes, and told with when they were', async () => {
    await turn();
    const begin = nowMs();
    spin(90);
    await turn();
    await turn();
    const end = nowMs();
    const { longestCpuMs, longestWallMs, longTurns, rows } = native.turnsSeen();
    expect(longTurns).toBe(1);
    expect(longestCpuMs).toBeGreaterThanOrEqual(90);
    expect(longestWallMs).toBeGreaterThanOrEqual(longestCpuMs - 2);
    const [began, ended, cpu] = rows;
    expect(rows).toHaveLength(3);
    expect(cpu).toBe(longestCpuMs);
    expect(began).toBeGreaterThan(begin - 15);
    expect(ended).toBeLessThanOrEqual(end);
  });

  it('a wait is no turn, and a blocked thread has one of wall time only', async () => {
    await sleep(120);
    expect(native.turnsSeen()).toMatchObject({ longTurns: 0, rows: new Float64Array(0) });
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 120);
    await turn();
    await turn();
    const { longestCpuMs, longestWallMs, longTurns } = native.turnsSeen();
    expect(longTurns).toBe(0);
    expect(longestCpuMs).toBeLessThan(50);
    expect(longestWallMs).toBeGreaterThan(110);
  });

  it('begin anew when they are watched anew', async () => {
    spin(60);
    await turn();
    await turn();
    native.watchTurns();
    expect(native.turnsSeen()).toEqual({ longestCpuMs: 0, longestWallMs: 0, longTurns: 0, rows: new Float64Array(0) });
  });
});

describe('the end of a process', () => {
  const binding = new URL('../../../../build/data-plane/kvtier_data_plane.node', import.meta.url).pathname;
  const run = (code: string) => {
    const program = `const native = require(${JSON.stringify(binding)}); process.on('exit', () => console.log('late')); ${code}`;
    const { status, signal, stderr, stdout } = spawnSync(process.execPath, ['-e', program], { encoding: 'utf8' });
    return { status, signal, stderr, stdout };
  };

  it('exitNow leaves with its code, and runs nothing any more', () => {
    expect(run('native.exitNow(7)')).toEqual({ status: 7, signal: null, stderr: '', stdout: '' });
  });

  it('killAfter says its line and kills a loop that stands still; the earliest counts', () => {
    const code = `native.killAfter(60_000, 'no\\n'); native.killAfter(100, 'too late\\n'); native.killAfter(30_000, 'no\\n'); for (;;);`;
    expect(run(code)).toEqual({ status: null, signal: 'SIGKILL', stderr: 'too late\n', stdout: '' });
  });
});

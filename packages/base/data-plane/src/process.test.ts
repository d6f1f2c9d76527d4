import { type ChildProcessWithoutNullStreams, spawn, spawnSync } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, ftruncateSync, mkdtempSync, openSync, readdirSync, readFileSync, readSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep, setImmediate as turn } from 'node:timers/promises';
import { beforeEach, describe, expect, it, onTestFinished, vi } from 'vitest';
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
    const before = nowMs();
    // The first may be of the turn that goes on already.
    await turn();
    await turn();
    const fresh = Buffer.allocUnsafeSlow(64 << 20)
      .subarray(0, 1 << 20)
      .fill(1); // larger than what an allocator keeps
    spin(90);
    await turn();
    await turn();
    const end = nowMs();
    const { longestCpuMs, longestWallMs, longTurns, rows } = native.turnsSeen();
    expect(longTurns).toBe(1);
    expect(longestCpuMs).toBeGreaterThanOrEqual(90);
    expect(longestWallMs).toBeGreaterThanOrEqual(longestCpuMs - 2);
    const [began, ended, cpu, newPages] = rows;
    expect(rows).toHaveLength(4);
    expect(newPages).toBeGreaterThanOrEqual(fresh.length / 4096);
    expect(cpu).toBe(longestCpuMs);
    expect(began).toBeGreaterThan(before);
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

describe('a pulse', () => {
  it('beats whatever the event loop does, and says how long a turn goes on', async () => {
    const folder = mkdtempSync(join(tmpdir(), 'kvtier-pulse-'));
    const fd = openSync(join(folder, 'beats'), 'w+');
    ftruncateSync(fd, 8192);
    const at = 4096 + 8;
    const read = () => {
      const words = Buffer.alloc(8);
      readSync(fd, words, 0, 8, at);
      return { beats: words.readUInt32LE(), stillMs: words.readUInt32LE(4) };
    };
    const beaten = (beats: number) =>
      vi.waitFor(() => expect(read().beats).toBeGreaterThan(beats), { timeout: 20_000 });
    expect(() => native.pulseStart(fd, 2)).toThrow('CONFIG');
    const pulse = native.pulseStart(fd, at);
    await beaten(2);
    const waits = (): void => void Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 100);
    // The loop waits, for the most part; a beat may find it at work.
    const isSoundAgain = () => vi.waitFor(() => expect(read().stillMs).toBeLessThan(50), { timeout: 20_000 });
    await isSoundAgain();
    for (const stand of [() => spin(100), waits]) {
      const { beats } = read();
      // In one turn, until its thread had its own also where others take both processors for a while.
      const longest = nowMs() + 20_000;
      const isSeen = (): boolean => read().beats > beats + 2 && read().stillMs > 190;
      while (!isSeen() && nowMs() < longest) stand();
      expect(isSeen()).toBe(true);
      await beaten(read().beats + 1);
      await isSoundAgain();
    }
    native.pulseEnd(pulse);
    const { beats } = read();
    await sleep(150);
    expect(read().beats).toBe(beats);
    native.pulseEnd(pulse);
    closeSync(fd);
    rmSync(folder, { recursive: true });
  });
});

/** What a process takes of its address space, once it has begun all its threads and none has anything to do. */
async function restingKib(pid: number): Promise<number> {
  const look = (): { readonly kib: number; readonly ticks: number } => {
    const kib = Number(/VmSize:\s+(\d+) kB/.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))![1]);
    const fieldsOf = (path: string): string[] =>
      readFileSync(path, 'latin1')
        .replace(/^.*\) /s, '')
        .split(' ');
    const fields = fieldsOf(`/proc/${pid}/stat`);
    const states = readdirSync(`/proc/${pid}/task`).map((thread) => fieldsOf(`/proc/${pid}/task/${thread}/stat`)[0]);
    const isAsleep = states.every((state) => state === 'S');
    return { kib: isAsleep ? kib : Number.NaN, ticks: Number(fields[11]) + Number(fields[12]) };
  };
  let [last, alike] = [look(), 1];
  while (alike < 3) {
    await sleep(100);
    const now = look();
    alike = now.kib === last.kib && now.ticks === last.ticks ? alike + 1 : 1;
    last = now;
  }
  return last.kib;
}

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

  /** A process that asks for its death at each thing that it is told, and has no room for another thread; what it said, and how it ended. */
  async function crowded(
    tell: (child: ChildProcessWithoutNullStreams, until: (said: string) => Promise<void>) => Promise<void>,
  ) {
    const code = `const native = require(${JSON.stringify(binding)});
      process.stdin.on('data', () => {
        try { native.killAfter(50, 'no thread, no line\\n'); process.stdout.write('set'); }
        catch (error) { process.stdout.write(error.message.slice(0, 6)); }
      });
      setInterval(() => {}, 1_000);
      process.stdout.write('ready');`;
    const child = spawn(process.execPath, ['-e', code]);
    onTestFinished(() => void child.kill('SIGKILL'));
    let [said, line] = ['', ''];
    child.stdout.on('data', (bytes) => {
      said += bytes;
    });
    child.stderr.on('data', (bytes) => {
      line += bytes;
    });
    const until = (words: string): Promise<void> => vi.waitFor(() => expect(said).toBe(words), { timeout: 20_000 });
    await until('ready');
    // Less than a thread's stack is left to it, once it takes no more by itself.
    limit(child, `--as=${((await restingKib(child.pid!)) + 4_096) * 1_024}`);
    const closed = once(child, 'close');
    await tell(child, until);
    const [, signal] = await closed;
    return { said, line, signal };
  }
  const limit = ({ pid }: { readonly pid?: number | undefined }, what: string): void =>
    expect(spawnSync('prlimit', ['--pid', String(pid), what]).status).toBe(0);

  it('killAfter kills also where no further thread can be had', async () => {
    const ended = await crowded(async (child) => void child.stdin.write('go'));
    // Only a thread would have said the line.
    expect(ended).toEqual({ said: 'readyset', line: '', signal: 'SIGKILL' });
  });

  it('killAfter that had neither thread nor timer is none: a later one counts', async () => {
    const ended = await crowded(async (child, until) => {
      limit(child, '--sigpending=0:1000');
      child.stdin.write('go');
      await until('readySETUP:');
      limit(child, '--sigpending=1000:1000');
      child.stdin.write('again');
    });
    expect(ended).toEqual({ said: 'readySETUP:set', line: '', signal: 'SIGKILL' });
  });

  it('killAfter says its line and kills a loop that stands still; the earliest counts', () => {
    const code = `native.killAfter(60_000, 'no\\n'); native.killAfter(100, 'too late\\n'); native.killAfter(30_000, 'no\\n'); for (;;);`;
    expect(run(code)).toEqual({ status: null, signal: 'SIGKILL', stderr: 'too late\n', stdout: '' });
  });
});

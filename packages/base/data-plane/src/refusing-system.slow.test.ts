/** Where the system has no thread to give, and where signals break its calls off: errors that can be caught, and calls that are made again. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const built = (path: string): string => fileURLToPath(new URL(`../../../../build/${path}`, import.meta.url));

/** What a program prints that has this library's functions in the place of the system's. */
function beside(
  source: string,
  program: (folder: string) => string,
): { stdout: string; stderr: string; signal: string | null } {
  const [folder, memory] = [join(tmpdir(), 'kvtier-refusing-'), '/dev/shm/kvtier-refusing-'].map((name) =>
    mkdtempSync(name),
  );
  onTestFinished(() => [folder, memory].forEach((path) => void rmSync(path!, { recursive: true })));
  const library = join(folder!, 'library.so');
  const file = fileURLToPath(new URL(`../cc/test/${source}`, import.meta.url));
  const build = spawnSync('g++', ['-std=c++20', '-shared', '-fPIC', file, '-o', library]);
  expect(build.stderr.toString()).toBe('');
  const env = { ...process.env, LD_PRELOAD: library };
  const args = ['--expose-gc', '-e', program(memory!)];
  const { stdout, stderr, signal } = spawnSync(process.execPath, args, { encoding: 'utf8', timeout: 60_000, env });
  return { stdout, stderr, signal };
}

it('where no thread is to be had, what needs one says so, and the process lives', () => {
  const program = (folder: string): string => `
    const fs = require('node:fs');
    const native = require(${JSON.stringify(built('data-plane/kvtier_data_plane.node'))});
    const executor = require(${JSON.stringify(built('executor/kvtier_executor.node'))});
    const arena = native.arenaCreate(${JSON.stringify(join(folder, 'arena'))}, 1 << 20, 1);
    const fd = fs.openSync(${JSON.stringify(join(folder, 'beats'))}, 'w+');
    fs.ftruncateSync(fd, 4096);
    const offsets = Float64Array.of(4096);
    const work = {
      pulse: () => native.pulseStart(fd, 0),
      checksum: () => native.arenaChecksum(arena, offsets, 4096),
      copy: () => native.arenaCopy(arena, offsets, offsets, 4096),
      verify: () => native.arenaVerify(arena, offsets, Float64Array.of(4096), new Uint8Array(64)),
      split: () => native.arenaSplitPlanes(arena, 4096, 4096, 2),
      join: () => native.arenaJoinPlanes(arena, 4096, [new Uint8Array(8), new Uint8Array(8)]),
      pages: () => native.preparePages(4096),
      queue: () => native.ioOpen(arena, { backend: 'auto', depth: 4, ioBytes: 4096 }, () => {}),
      values: () => native.valuesOpen(arena, () => {}),
      executor: () => executor.open({}, {}, {}, undefined),
    };
    const mapped = () => fs.readFileSync('/proc/self/maps', 'utf8').split('\\n').filter((line) => line.includes('beats')).length;
    const opened = () => fs.readdirSync('/proc/self/fd').filter((fd) => {
      try { return fs.readlinkSync('/proc/self/fd/' + fd).match(/stat$|event(fd|poll)/); } catch { return false; }
    }).length;
    (async () => {
      const before = opened();
      process.env.KVTIER_TEST_THREADS_LEFT = '0';
      for (const [name, start] of Object.entries(work)) {
        let began;
        try { began = start(); } catch (error) { console.log(name, 'threw', error.message); continue; }
        await began.then(() => console.log(name), (error) => console.log(name, 'rejected', error.message));
      }
      console.log('left', mapped(), opened() - before);
      delete process.env.KVTIER_TEST_THREADS_LEFT;
      console.log('again', (await native.arenaChecksum(arena, offsets, 4096)).length);
    })();`;
  const why =
    'SETUP: no further thread can be had (Resource temporarily unavailable); raise the limit of processes (pids.max, RLIMIT_NPROC)';
  const expected = [
    ...['pulse threw'],
    ...['checksum', 'copy', 'verify', 'split', 'join', 'pages'].map((name) => `${name} rejected`),
    'queue threw',
    'values threw',
    'executor rejected',
  ];
  expect(beside('no_more_threads.cc', program)).toEqual({
    stdout: [...expected.map((line) => `${line} ${why}`), 'left 0 0', 'again 1', ''].join('\n'),
    stderr: '',
    signal: null,
  });
});

it('a reservation of the arena that a signal breaks off is made again, in pieces that come to an end', () => {
  const bytes = 160 << 20;
  const { stdout, stderr } = beside(
    'broken_off_reservations.cc',
    (folder) => `
      const native = require(${JSON.stringify(built('data-plane/kvtier_data_plane.node'))});
      const path = ${JSON.stringify(join(folder, 'arena'))};
      native.arenaCreate(path, ${bytes}, 1);
      console.log('blocks', require('node:fs').statSync(path).blocks * 512);`,
  );
  expect(stderr).toBe('');
  const lines = stdout.trim().split('\n');
  expect(lines.pop()).toBe(`blocks ${bytes}`);
  const calls = lines.map((line) => line.split(' ') as [name: string, offset: string, bytes: string, end: string]);
  const reserved = calls.filter(([name, , , end]) => name === 'posix_fallocate' && end === 'made');
  let at = 0;
  for (const [, from, count] of reserved) {
    expect(Number(from)).toBe(at);
    at += Number(count);
  }
  expect(at).toBe(bytes);
  for (const [i, [name, offset, , end]] of calls.entries())
    if (end === 'broken') expect(calls[i + 1]!.slice(0, 2)).toEqual([name, offset]);
  expect(calls.some(([name]) => name === 'fallocate')).toBe(true);
});

it('a queue that is closed and forgotten ends on its own thread, however late the thread that closed it', () => {
  const program = (folder: string): string => {
    // Node's own functions come before any library's, so they are asked for by other names.
    const addon = join(folder, 'addon.node');
    const bytes = readFileSync(built('data-plane/kvtier_data_plane.node'), 'latin1');
    writeFileSync(addon, bytes.replace(/napi(_delete_reference|_call_threadsafe_function)\0/g, 'napj$1\0'), 'latin1');
    return `
      const { setTimeout: sleep } = require('node:timers/promises');
      const native = require(${JSON.stringify(addon)});
      const arena = native.arenaCreate(${JSON.stringify(join(folder, 'arena'))}, 1 << 20, 1);
      const closed = () => native.ioClose(native.ioOpen(arena, { backend: 'threads', depth: 1, ioBytes: 4096 }, () => {}));
      (async () => {
        await closed();
        for (let i = 0; i < 5; i++) gc(), await sleep(20);
        console.log('closed');
        await sleep(600);
      })();`;
  };
  expect(beside('slow_returns.cc', program)).toEqual({ stdout: 'closed\n', stderr: '', signal: null });
});

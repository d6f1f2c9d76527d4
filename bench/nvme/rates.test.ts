/** The limit of the disk tier's rates is the best that fio had, whatever the size of its I/O; where the tier is above, that is said. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, onTestFinished, vi } from 'vitest';
import { fio, type Rate } from './fio.ts';
import { figuresOf } from './rates.ts';

const rates = (...values: readonly number[]): Rate[] => values.map((value) => ({ rate: value, cpu: 1 / value }));

function measured(read: number): Map<string, Rate[]> {
  const ours = ['read', 'read_one_request', 'read_random', 'write'].map((name) => [name, rates(read)] as const);
  const fio = ['read', 'write'].flatMap((kind) =>
    ['block', '1m'].flatMap((io) => [1, 2, 4].map((jobs) => [`fio ${kind} ${io} ${jobs}`, rates(1)] as const)),
  );
  return new Map([...ours, ...fio, ['fio read block 4', rates(9, 1.5, 1.4)], ['fio read 1m 2', rates(2, 1.9, 2.1)]]);
}

it('the limit is the best median over jobs and sizes of I/O', () => {
  const lines: string[] = [];
  const [read, , , cpu, write] = figuresOf('64k', 64 << 10, measured(1), (line) => lines.push(line));
  expect(read).toMatchObject({ name: 'read_64k', value: 1, limit: 2, ratio: 0.5 });
  expect(cpu).toMatchObject({ name: 'cpu_read_64k', limit: 1 / 1.5 }); // of I/O of the block's size
  expect(write).toMatchObject({ name: 'write_64k', limit: 1 });
  expect(lines).toEqual([]);
});

it('a rate above the limit says that fio did not reach it', () => {
  const lines: string[] = [];
  figuresOf('64k', 64 << 10, measured(2.3), (line) => lines.push(line));
  expect(lines).toEqual([
    'read_64k: limit not reached by fio: 2.30 beside 2.00 GB/s (fio read 1m 2)',
    'read_one_request_64k: limit not reached by fio: 2.30 beside 2.00 GB/s (fio read 1m 2)',
    'read_random_64k: limit not reached by fio: 2.30 beside 2.00 GB/s (fio read 1m 2)',
    'write_64k: limit not reached by fio: 2.30 beside 1.00 GB/s (fio write block 1)',
  ]);
});

it('where blocks have 1 MiB themselves, fio runs with that size once', () => {
  const ours = ['read', 'read_one_request', 'read_random', 'write'].map((name) => [name, rates(1)] as const);
  const fio = ['read', 'write'].flatMap((kind) =>
    [1, 2, 4].map((jobs) => [`fio ${kind} 1m ${jobs}`, rates(jobs)] as const),
  );
  expect(figuresOf('1m', 1 << 20, new Map([...ours, ...fio]), () => {})[0]).toMatchObject({ limit: 4 });
});

/** In place of the real one. */
function fakeFio(script: string): string {
  const bin = mkdtempSync(join(tmpdir(), 'kvtier-fio-'));
  writeFileSync(join(bin, 'fio'), `#!/bin/sh\n${script}\n`, { mode: 0o755 });
  vi.stubEnv('PATH', `${bin}:${process.env.PATH}`);
  onTestFinished(() => {
    vi.unstubAllEnvs();
    rmSync(bin, { recursive: true, force: true });
  });
  return bin;
}

it('fio has what the tier has: memory and files that are registered', async () => {
  const moved = '{"bw_bytes":2e9,"io_bytes":4e9}';
  const job = `{"read":${moved},"write":${moved},"usr_cpu":25,"sys_cpu":25,"job_runtime":4000}`;
  const bin = fakeFio(`echo "$@" > $(dirname $0)/args; echo '{"jobs":[${job}]}'`);
  expect(await fio(['a', 'b'], 'read', 1 << 20, 2, 400)).toEqual({ rate: 2, cpu: 0.5 });
  expect(readFileSync(join(bin, 'args'), 'utf8')).toMatch(/--bs=1048576 .*--registerfiles=1 --fixedbufs=1 /);
});

it('where memory cannot be registered fio does without, as the tier does, and is not asked for it again', async () => {
  const said = vi.spyOn(console, 'error').mockImplementation(() => {});
  const moved = '{"bw_bytes":2e9,"io_bytes":4e9}';
  const job = `{"read":${moved},"write":${moved},"usr_cpu":25,"sys_cpu":25,"job_runtime":4000}`;
  const bin = fakeFio(
    `echo x >> $(dirname $0)/runs; case "$*" in *fixedbufs*) exit 1;; esac; echo '{"jobs":[${job}]}'`,
  );
  for (let i = 0; i < 2; i++) expect((await fio(['a'], 'read', 1 << 20, 1, 400)).rate).toBe(2);
  expect([readFileSync(join(bin, 'runs'), 'utf8'), said.mock.calls.length]).toEqual(['x\nx\nx\n', 1]);
  said.mockRestore();
});

it('where fio does not run, one line says why', async () => {
  fakeFio('echo "fio: cannot lock memory" >&2; exit 1');
  await expect(fio(['a'], 'read', 1 << 20, 1, 400)).rejects.toThrow(
    'fio: does not run here (fio: cannot lock memory); apt-get install fio, or let it lock memory: ulimit -l',
  );
});

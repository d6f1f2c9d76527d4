/**
 * The CUDA backend's runtime and every kernel, run on the CPU by the emulator: `runtime_check` and `kernel_check` as built by
 * `npm test` (packages/executor/cuda/CMakeLists.txt). Each line they print is one comparison with a CPU reference; the same
 * programs run on a GPU with `npm run test:gpu`.
 */
import { spawnSync } from 'node:child_process';
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { expect, test } from 'vitest';

interface Line {
  readonly kernel: string;
  readonly case: string;
  readonly maxError: number | null;
  readonly allowed: number | null;
  readonly ok: boolean;
  readonly error?: string;
}

/** Exit code and comparisons of one of the programs. */
function run(name: string): { readonly status: number | null; readonly lines: Line[] } {
  const program = fileURLToPath(new URL(`../../../build/cuda-emulated/${name}`, import.meta.url));
  const child = spawnSync(program, [], { encoding: 'utf8', timeout: 200_000, maxBuffer: 16 << 20 });
  if (child.error) throw new Error(`${program}: ${child.error.message}; run: npm test, which builds it`);
  const lines = child.stdout
    .split('\n')
    .filter((line) => line !== '')
    .map((line) => JSON.parse(line) as Line);
  if (child.status !== 0 && lines.every((line) => line.ok))
    throw new Error(`${name} died: ${child.stderr.slice(-500)}`);
  return { status: child.status, lines };
}

/** The functions that kernels.h declares: each must have a comparison, and a new one must get one. */
function declared(): string[] {
  const header = readFileSync(new URL('../cuda/kernels/kernels.h', import.meta.url), 'utf8');
  return [...header.matchAll(/^void (\w+)\(Stream&/gm)].map((match) => match[1]!).sort();
}

test('the runtime keeps what gpu.h promises: order, deadlines, graphs, faults', () => {
  const { status, lines } = run('runtime_check');
  expect(lines.filter((line) => !line.ok)).toEqual([]);
  const covered = new Set(lines.map((line) => line.kernel));
  expect([...covered].sort()).toEqual(
    ['Buffer', 'Copy', 'Copy2D', 'Event', 'Fault', 'Graph', 'Launch', 'RegisterHost', 'Set', 'Stream'].sort(),
  );
  expect(status).toBe(0);
});

test('every kernel of kernels.h agrees with its CPU reference', () => {
  const { status, lines } = run('kernel_check');
  expect(lines.filter((line) => !line.ok)).toEqual([]);
  const covered = new Set(lines.map((line) => line.kernel));
  expect(declared().filter((kernel) => !covered.has(kernel))).toEqual([]);
  expect(status).toBe(0);
});

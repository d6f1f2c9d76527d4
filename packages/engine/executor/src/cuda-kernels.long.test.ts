/**
 * The CUDA backend's runtime and every kernel, run on the CPU by the emulator: `runtime_check` and `kernel_check` as built by
 * `npm run test:long` (packages/engine/cuda/CMakeLists.txt). Each line they print is one comparison with a CPU reference; the same
 * programs run on a GPU with `npm run test:gpu`.
 */
import { execFile } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import { expect, it } from 'vitest';

interface Line {
  readonly kernel: string;
  readonly case: string;
  readonly maxError: number | null;
  readonly allowed: number | null;
  readonly ok: boolean;
  readonly error?: string;
}

const runFile = promisify(execFile);
const deadlineMs = 600_000; // about 40 s of CPU when all is quiet; on a busy machine it may wait long for its turn

/** What one of the programs compares; `names`: only checks whose name contains one of these. */
async function run(name: string, names: readonly string[] = [], env: NodeJS.ProcessEnv = {}): Promise<Line[]> {
  const program = fileURLToPath(new URL(`../../../../build/cuda-emulated/${name}`, import.meta.url));
  try {
    const { stdout } = await runFile(program, [...names], {
      timeout: deadlineMs,
      maxBuffer: 16 << 20,
      env: { ...process.env, ...env },
    });
    return parse(stdout);
  } catch (error) {
    const { stdout = '', stderr = '', message } = error as { stdout?: string; stderr?: string; message: string };
    const lines = parse(stdout);
    if (lines.some((line) => !line.ok)) return lines; // a failed comparison is also the exit code's reason
    throw new Error(`${program}: ${message.split('\n')[0]}; built by npm run test:long\n${stderr.slice(-500)}`);
  }
}

function parse(stdout: string): Line[] {
  const lines = stdout.split('\n').filter((line) => line.endsWith('}')); // the last of a program that died may be half
  return lines.map((line) => JSON.parse(line) as Line);
}

/** All checks of kernel_check, in two processes at a time. */
async function runKernels(): Promise<Line[]> {
  const program = fileURLToPath(new URL('../../../../build/cuda-emulated/kernel_check', import.meta.url));
  const { stdout } = await runFile(program, ['--list'], { timeout: deadlineMs });
  const names = stdout.split('\n').filter((name) => name !== '');
  const halves = [0, 1].map((half) => names.filter((_, index) => index % 2 === half));
  return (await Promise.all(halves.map((half) => run('kernel_check', half)))).flat();
}

interface Mutated {
  readonly wait: string;
  readonly found: string | null;
  readonly late?: string;
}

/** Waits that these checks meet, by "file:line", and which check misses each when it is taken away (checks/mutate.h). */
async function mutated(names: readonly string[], env: NodeJS.ProcessEnv = {}): Promise<Mutated[]> {
  const program = fileURLToPath(new URL('../../../../build/cuda-emulated/kernel_check', import.meta.url));
  const { stdout } = await runFile(program, ['--mutate', ...names], {
    timeout: deadlineMs,
    env: { ...process.env, ...env },
  });
  return stdout
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Mutated);
}

/** The waits that stand in the kernels' sources, as "file:line". */
function written(): string[] {
  const folder = new URL('../../cuda/kernels/', import.meta.url);
  const wait = /\b(?:__syncthreads|__syncwarp|WaitForPrevious)\(|\bCopyAsyncWait</;
  return readdirSync(folder)
    .filter((name) => /\.cuh?$/.test(name))
    .flatMap((name) =>
      readFileSync(new URL(name, folder), 'utf8')
        .split('\n')
        .flatMap((line, index) => (wait.test(line.replace(/\/\/.*/, '')) ? [`${name}:${index + 1}`] : [])),
    )
    .sort();
}

/** The functions that kernels.h declares: each must have a comparison, and a new one must get one. */
function declared(): string[] {
  const header = readFileSync(new URL('../../cuda/kernels/kernels.h', import.meta.url), 'utf8');
  return [...header.matchAll(/^void (\w+)\(Stream&/gm)].map((match) => match[1]!).sort();
}

it(
  'the runtime keeps what gpu.h promises: order, deadlines, graphs, faults',
  async () => {
    const lines = await run('runtime_check');
    expect(lines.filter((line) => !line.ok)).toEqual([]);
    expect([...new Set(lines.map((line) => line.kernel))].sort()).toEqual(
      ['Buffer', 'Copy', 'Copy2D', 'Event', 'Fault', 'Graph', 'Launch', 'RegisterHost', 'Set', 'Stream'].sort(),
    );
  },
  deadlineMs,
);

it(
  'streams that wait hold up the others where they have to share eight queues, and not where the runtime asks for more',
  async () => {
    const name = 'streams_beside_waiting_ones';
    const lines = [
      await run('runtime_check', [name], { CUDA_DEVICE_MAX_CONNECTIONS: '8' }),
      await run('runtime_check', [name]),
    ];
    expect(lines.map((of) => of.map(({ ok }) => ok))).toEqual([[false], [true]]);
  },
  deadlineMs,
);

it(
  'every kernel of kernels.h agrees with its CPU reference',
  async () => {
    const lines = await runKernels();
    expect(lines.filter((line) => !line.ok)).toEqual([]);
    const covered = new Set(lines.map((line) => line.kernel.split(' ')[0])); // "Attention v2"
    expect(declared().filter((kernel) => !covered.has(kernel))).toEqual([]);
  },
  deadlineMs,
);

it(
  'GPUs that grant a thread block 99 KiB: products are the same bits, and heads that have no room are refused',
  async () => {
    const lines = await run('kernel_check', ['gemm_shared_rows', 'gemm_batch_invariance', 'model_wide_heads'], {
      KVTIER_EMULATED_SHARED: `${99 << 10}`,
    });
    expect(lines.length).toBeGreaterThan(10);
    expect(lines.filter((line) => !line.ok)).toEqual([]);
  },
  deadlineMs,
);

it(
  'a kernel that lacks a barrier, or a wait for a copy or for the launch before it, fails its checks',
  async () => {
    const waits = await mutated([
      ...[
        'attention_warp',
        'attention_mixed',
        'attention_parts',
        'attention_company',
        'attention_ways_agree',
        'sampling',
      ],
      ...['gemm_unaligned', 'gemm_batch_invariance', 'rope_far', 'norm', 'transfer_hash', 'gemm_tiles'],
      'model_dependent_launches',
    ]);
    expect(waits.map(({ wait }) => wait).sort()).toEqual(written());
    expect(waits.filter(({ found }) => found === null)).toEqual([]);
  },
  deadlineMs,
);

it(
  'a check that is only late says nothing of the wait that it lacks',
  async () => {
    const waits = await mutated(['transfer_hash'], { KVTIER_MUTATE_LATE_MS: '1' });
    expect(waits.map(({ found, late }) => [found, late])).toEqual([
      [null, 'transfer_hash'],
      [null, 'transfer_hash'],
    ]);
  },
  deadlineMs,
);

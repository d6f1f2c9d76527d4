/**
 * The figures that a GPU machine's half hour gives, here on the emulator at a 64th of the size: that `kernel_bench` prints each at once, and that a
 * case which fails or hangs costs itself only.
 */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, symlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const builds = fileURLToPath(new URL('../../../../build/cuda-emulated', import.meta.url));
const [program, standIn] = [join(builds, 'kernel_bench'), join(builds, 'libstandin_cublaslt.so')];
const cuda = fileURLToPath(new URL('../../cuda', import.meta.url));
const deadlineMs = 600_000; // some ten seconds of CPU; on a busy machine it may wait long for its turn

interface Line {
  readonly name?: string;
  readonly value?: number;
  readonly unit?: string;
  readonly limit?: number;
  readonly limitName?: string;
  readonly ratio?: number;
  readonly case?: string;
  readonly error?: string;
  readonly gemm?: string;
  readonly gemmTflops?: number;
  readonly favouriteTflops?: number;
}

function bench(args: readonly string[], env: NodeJS.ProcessEnv = {}): { code: number | null; lines: Line[] } {
  const { status, stdout } = spawnSync(program, args, {
    encoding: 'utf8',
    timeout: deadlineMs,
    env: { ...process.env, ...env },
  });
  return {
    code: status,
    lines: stdout
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line) as Line),
  };
}

it(
  'a prompt cold, warm from the arena and from a disk, beside decodes, and the same token: each figure beside its limit',
  () => {
    const { code, lines } = bench(['--seconds', '300', 'system_'], { KVTIER_BENCH_DIR: process.cwd() });
    expect(lines.filter((line) => line.error !== undefined)).toEqual([]);
    expect(code).toBe(0);
    for (const line of lines) {
      expect(line.value, line.name).toBeGreaterThan(0);
      expect(line.limit, line.name).toBeGreaterThan(0);
      expect(line.ratio, line.name).toBeGreaterThan(0);
    }
    const named = (words: string) => lines.filter(({ name }) => name!.startsWith(words)).length;
    expect([named('cold'), named('warm from the arena'), named('warm from the disk'), named('start')]).toEqual([
      2, 6, 2, 6,
    ]);
    expect([named('8B decode'), named('exports'), named('imports')]).toEqual([4, 1, 1]);
    for (const move of ['exports', 'imports']) {
      const limitName = lines.find(({ name }) => name!.startsWith(`${move} beside 8B decode`))?.limitName;
      expect(limitName, move).toBe('one pinned copy, alone');
    }
    const ratio = (words: string) => lines.find(({ name }) => name!.includes(words))?.ratio;
    expect(ratio('same greedy token warm as cold, or a tie')).toBe(1);
    expect(ratio('from blocks that came back as from blocks that never left')).toBe(1);
    expect(ratio('with equal bits: prompts with the same bits warm as cold')).toBe(1);
    expect(ratio('largest distance from cold')).toBeLessThan(1);
    expect([named('step size: a token'), named('step size: tokens')]).toEqual([2, 1]);
  },
  deadlineMs,
);

it(
  'a case that throws, or is not done in time, is a line with its error, and the others are measured',
  () => {
    const thrown = bench(['system_disk', 'transfer_pinning'], { KVTIER_BENCH_DIR: '/nowhere' });
    expect(thrown.code).toBe(1);
    expect(thrown.lines.map((line) => line.case ?? line.name).sort()).toEqual([
      'pin an arena of 4 GiB in chunks of 512 MiB',
      'system_disk',
    ]);
    expect(thrown.lines.find((line) => line.case === 'system_disk')?.error).toMatch(
      /^\/nowhere\/kvtier-bench-\d+: No such file or directory; KVTIER_BENCH_DIR names a folder/,
    );
    const late = bench(['--seconds', '0', 'system_disk']);
    expect(late).toEqual({
      code: 1,
      lines: [{ case: 'system_disk', error: 'did not end within 0 s, and was killed' }],
    });
  },
  deadlineMs,
);

it(
  'no figure of an import that brings nothing',
  () => {
    const without = (bytes: number, name = 'transfer') =>
      bench(['--case', name], { KVTIER_EMULATED_LOST: `${bytes}` }).lines.map((line) => line.error ?? line.name);
    const sizes = '2048 KiB x 4';
    expect(without(2 << 20)).toEqual([`export ${sizes}`, 'a block arrived wrong']);
    // Four of 32 layers come together.
    expect(without((2 << 20) / 8)).toEqual([`export ${sizes}`, `import ${sizes}`, 'a block arrived wrong']);
    expect(without(2 << 20, 'transfer_while_decoding')).toEqual(['a block arrived wrong']);
  },
  deadlineMs,
);

it(
  'the limit of products is the fastest of the algorithms that cuBLASLt names, and not its favourite; the probe tells both',
  () => {
    const place = mkdtempSync(join(tmpdir(), 'kvtier-gpu-figures-'));
    onTestFinished(() => rmSync(place, { recursive: true }));
    symlinkSync(standIn, join(place, 'libcublasLt.so.13'));
    const env = { LD_LIBRARY_PATH: place, KVTIER_STANDIN_FAVOURITE_MS: '500' };
    const { code, lines } = bench(['--probe', '--rate'], env);
    const [probe] = lines;
    expect(probe?.gemm).toBe('cuBLASLt bf16 128^3, the fastest of 2');
    expect(probe!.favouriteTflops!).toBeLessThan((2 * 128 ** 3) / 0.5 / 1e12);
    expect(probe!.gemmTflops!).toBeGreaterThan(2 * probe!.favouriteTflops!);
    expect(code).toBe(0);
    const figure = bench(['--case', 'attention_tail'], env).lines.find(({ unit }) => unit === 'TFLOP/s');
    expect(figure?.limitName).toBe(probe?.gemm);
    expect(figure!.limit!).toBeGreaterThan(2 * probe!.favouriteTflops!);
  },
  deadlineMs,
);

it(
  'cases give as many figures as the verdicts expect of them, and the session names none that is unknown',
  () => {
    const { lines } = bench([
      '--seconds',
      '300',
      'transfer',
      'model_8b',
      'system_8192',
      'system_beside',
      'system_equal',
    ]);
    const text = lines.map((line) => JSON.stringify(line)).join('\n');
    const { stdout } = spawnSync('awk', ['-f', `${cuda}/verdicts.awk`], {
      input: text.replaceAll(`steps of ${8192 / 64}"`, 'steps of 8192"'),
      encoding: 'utf8',
    });
    const counts = stdout.split('\n').flatMap((line) => /^(?:met|SHORT): .* \d+ of (\d+)(?:;|$)/.exec(line)?.[1] ?? []);
    expect(stdout).not.toContain('INCOMPLETE');
    expect(counts, stdout).toEqual(['9', '4', '8', '4', '2', '3', '3']);
    const known = spawnSync(program, ['--list'], { encoding: 'utf8' }).stdout.split('\n');
    const plan = readFileSync(`${cuda}/gpu-session.sh`, 'utf8');
    const named = [...plan.matchAll(/^(?:speed|system) \d+ \d+ (\w+)$/gm)].map(([, name]) => name);
    expect(named.length).toBeGreaterThan(12);
    expect(named.filter((name) => !known.includes(name!))).toEqual(['torch_attention']);
  },
  deadlineMs,
);

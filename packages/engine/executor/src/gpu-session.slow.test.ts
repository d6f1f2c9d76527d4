/**
 * What a GPU machine's half hour runs, without one: that the packed system runs in an empty folder, and that `gpu-session.sh` says in one
 * line what it cannot do, with an exit code of its own. What `kernel_bench` prints: gpu-figures.slow.test.ts.
 */
import { spawnSync } from 'node:child_process';
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, expect, it } from 'vitest';

const builds = fileURLToPath(new URL('../../../../build', import.meta.url));
const programs = join(builds, 'cuda-emulated');
const packing = new URL('../../../../scripts/lib/packed-system.mjs', import.meta.url).href;
const session = fileURLToPath(new URL('../../cuda/gpu-session.sh', import.meta.url));
const deadlineMs = 300_000; // some ten seconds of CPU; on a busy machine it may wait long for its turn

interface Line {
  readonly name?: string;
}

let out = '';
beforeAll(() => {
  out = mkdtempSync(join(tmpdir(), 'kvtier-gpu-session-'));
});
afterAll(() => rmSync(out, { recursive: true }));

function run(program: string, args: readonly string[], env: NodeJS.ProcessEnv = {}) {
  const ended = spawnSync(program, args, { encoding: 'utf8', timeout: deadlineMs, env: { ...process.env, ...env } });
  return { code: ended.status, stdout: ended.stdout, stderr: ended.stderr };
}

it(
  'the system, packed with its Node, runs in an empty folder: prompts cold, from the arena and, after a restart, from the disk',
  async () => {
    const folder = join(out, 'unpacked');
    const { packSystem } = (await import(packing)) as { packSystem(folder: string, modules: object): Promise<void> };
    const built = ['data-plane/kvtier_data_plane.node', 'executor/kvtier_executor.node'];
    await packSystem(join(folder, 'system'), Object.fromEntries(built.map((name) => [name, join(builds, name)])));
    mkdirSync(join(folder, 'sources'));
    copyFileSync(session, join(folder, 'gpu-session.sh'));
    const ended = spawnSync('bash', [join(folder, 'gpu-session.sh')], {
      cwd: folder,
      encoding: 'utf8',
      timeout: deadlineMs,
      env: { PATH: '/usr/bin:/bin', HOME: folder },
    });
    expect(ended.stdout).toContain('no programs for one: nothing was measured: probe, build,');
    expect(ended.stdout).toContain('dry run: the packed system runs here, on the CPU: 9 lines');
    expect(ended.status).toBe(3);
    const lines = readFileSync(join(folder, 'results/dry-run.jsonl'), 'utf8').trim().split('\n');
    expect(lines.map((line) => (JSON.parse(line) as Line).name)).toEqual([
      'start_up_1m',
      'start_attached_1m',
      'start_first_token_1m',
      'ttft_cold_600_1m',
      'ttft_engine_600_1m',
      'ttft_arena_600_1m',
      'ttft_young_600_1m',
      'ttft_disk_600_1m',
      'decodes_2_1m',
    ]);
    rmSync(join(folder, 'system/node'));
    const without = run(join(folder, 'gpu-session.sh'), ['whole'], { PATH: '/usr/bin:/bin' });
    expect(without.code).toBe(1);
    expect(without.stdout).toContain('no Node is packed here');
  },
  deadlineMs,
);

it('what is asked is said to be met, short by how much, or not measured', () => {
  const verdicts = fileURLToPath(new URL('../../cuda/verdicts.awk', import.meta.url));
  const figures = [
    ...[
      ['export 64 KiB x 512', 0.93],
      ['import 64 KiB x 512', 0.9],
      ['import by layer 2 MiB x 64', 0.71],
    ],
    ...[
      ['export while decoding 64 KiB x 512', 0.86],
      ['imports beside 8B decode 40 blocks of 2048 KiB', 0.849],
    ],
    ...[
      ['8B decode, batch 32, beside exports 2048 tokens each', 0.98],
      ['warm from the arena 512 a step', 9.2],
    ],
    ...[
      ['ttft_arena_10000_8b_steps_512', 8.9],
      ['8B prefill bf16 8192 tokens', 0.61],
    ],
    ...[
      ['8B decode bf16 batch 32, 2048 tokens each', 0.8],
      ['8B decode bf16 batch 8, 2048 tokens each', 0.1],
    ],
    ...[
      ['8B decode bf16 batch 1, 2048 tokens each, dependent launches', 0.2],
      ['8B decode bf16 batch 32, one of 100000 tokens among 31 of 500', 1e-3],
    ],
  ].map(([name, ratio]) => `${JSON.stringify({ name, value: 1, limit: 1, limitName: 'of "all"', ratio })}\n`);
  figures.push('{"case":"system_equal","error":"no \\"ratio\\":1"}\n', '{"name":"8B: prom');
  const { stdout, status } = spawnSync('awk', ['-f', verdicts], { input: figures.join(''), encoding: 'utf8' });
  expect([status, ...stdout.trim().split('\n')]).toEqual([
    0,
    'SHORT: exports and imports alone, of one pinned copy, 0.9, 2 of 3; import by layer 2 MiB x 64: 0.71',
    'SHORT: the same beside decodes, 0.85, 1 of 2; imports beside 8B decode 40 blocks of 2048 KiB: 0.849',
    'met: decodes beside them, of decodes alone, 0.97, 1 of 1',
    'SHORT: a hit of the arena, of the same prompt computed, 9, 1 of 2; ttft_arena_10000_8b_steps_512: 8.9',
    'met: prefill, of the rate of matrix products, 0.6, 1 of 1',
    "not measured: attention, of torch's flash attention, 0.6",
    "SHORT: decodes at batch 1 and 32, equal and unequal, of the memory's speed, 0.75, 1 of 2; 8B decode bf16 batch 32, one of 100000 tokens among 31 of 500: 0.001",
    'not measured: prompts that give the same warm as cold, 1',
  ]);
});

/** What torch_attention.py needs of torch: calls that take no time, events two milliseconds apart. */
const standInTorch: Readonly<Record<string, string>> = {
  'torch/__init__.py': `
__version__, bfloat16, uint8 = "0", None, None
class cuda:
    is_available = staticmethod(lambda: True)
    class Event:
        def __init__(self, enable_timing): pass
        def record(self): pass
        def synchronize(self): pass
        def elapsed_time(self, other): return 2.0
class Tensor:
    def fill_(self, value): pass
def randn(*shape, **more): return Tensor()
def empty(*shape, **more): return Tensor()
`,
  'torch/nn/__init__.py': '',
  'torch/nn/functional.py': 'def scaled_dot_product_attention(*all, **more): pass\n',
  'torch/nn/attention/__init__.py': `
from contextlib import nullcontext
class SDPBackend: FLASH_ATTENTION = CUDNN_ATTENTION = 0
def sdpa_kernel(backend): return nullcontext()
`,
  'torch/nn/attention/bias.py': 'def causal_lower_right(*shape): pass\n',
};

it("the verdicts read what is said of torch's attention", () => {
  const cuda = fileURLToPath(new URL('../../cuda', import.meta.url));
  for (const [file, text] of Object.entries(standInTorch)) {
    mkdirSync(join(out, 'python', file, '..'), { recursive: true });
    writeFileSync(join(out, 'python', file), text);
  }
  const name = 'Attention v2 bf16, 1 x 8192 queries over 0 tokens';
  const ours = { name, value: 200, unit: 'TFLOP/s', limit: 800, limitName: 'cuBLASLt', ratio: 0.25 };
  const torch = spawnSync('python3', [join(cuda, 'checks/torch_attention.py')], {
    input: `${JSON.stringify(ours)}\n`,
    encoding: 'utf8',
    env: { ...process.env, PYTHONPATH: join(out, 'python'), PYTHONDONTWRITEBYTECODE: '1' },
  });
  expect(torch.status, torch.stderr).toBe(0);
  const { stdout } = spawnSync('awk', ['-f', join(cuda, 'verdicts.awk')], { input: torch.stdout, encoding: 'utf8' });
  expect(stdout).toContain("met: attention, of torch's flash attention, 0.6, 1 of 1\n");
});

it(
  'the session says what it lacks in one line, each with an exit code of its own',
  () => {
    const env = { OUT: out, KVTIER_GPU_BIN: programs, KVTIER_WITHOUT_CUBLASLT: '' };
    expect(run(session, ['nothing'], env)).toMatchObject({
      code: 2,
      stderr: 'nothing: unknown stage; there are: probe build checks speed system whole sanitize\n',
    });
    const without = run(session, ['probe'], env);
    expect(without.code).toBe(4);
    expect(readFileSync(join(out, 'summary.txt'), 'utf8')).toContain('FAILED probe: cuBLASLt was not found');
    expect(run(session, ['probe'], { ...env, KVTIER_WITHOUT_CUBLASLT: '1' }).code).toBe(0);
    expect(readFileSync(join(out, 'figures.jsonl'), 'utf8')).toContain('{"device":"emulated"');
    const nothing = run(session, ['speed'], { ...env, KVTIER_GPU_BIN: out, PATH: '/usr/bin:/bin' });
    expect(nothing.code).toBe(3);
    expect(nothing.stdout).toMatch(
      /^[\d:]{8} dry run: no GPU \(no nvidia-smi\) and no programs for one: nothing was measured: speed\n$/,
    );
  },
  deadlineMs,
);

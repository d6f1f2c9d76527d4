/**
 * What a GPU machine's half hour runs, without one: that the packed system runs in an empty folder, and that `gpu-session.sh` says in one
 * line what it cannot do, with an exit code of its own. What `kernel_bench` prints: gpu-figures.long.test.ts.
 */
import { spawnSync } from 'node:child_process';
import { copyFileSync, mkdirSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
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

it(
  'the session says what it lacks in one line, each with an exit code of its own',
  () => {
    const env = { OUT: out, KVTIER_GPU_BIN: programs, KVTIER_WITHOUT_CUBLASLT: '' };
    expect(run(session, ['nothing'], env)).toMatchObject({
      code: 2,
      stderr: 'nothing: unknown stage; there are: probe build checks speed system connector whole sanitize\n',
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

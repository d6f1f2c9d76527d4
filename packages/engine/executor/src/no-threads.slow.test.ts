/** Where the system has fewer threads than an executor takes, its opening is refused, whichever of them is the first that is missing. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const root = fileURLToPath(new URL('../../../..', import.meta.url));

// The steps' own, one that computes, one that copies to the pool and one that copies from it, at least.
it.each([0, 1, 2, 3])('with %i threads left', (left) => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-no-threads-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const library = join(folder, 'no_more_threads.so');
  const source = join(root, 'packages/base/data-plane/cc/test/no_more_threads.cc');
  expect(spawnSync('g++', ['-std=c++20', '-shared', '-fPIC', source, '-o', library]).stderr.toString()).toBe('');
  const program = `
    import { createExecutor } from ${JSON.stringify(join(root, 'packages/engine/executor/src/index.ts'))};
    import { native } from '@kvtier/data-plane';
    const modelDir = ${JSON.stringify(join(root, 'test/numerics/golden/llama'))};
    const options = { modelDir, blockTokens: 16, blockCount: 64, threads: 2, maxStepTokens: 256, maxStepSequences: 4 };
    await (await createExecutor(options)).close(); // Node has its own threads
    process.env.KVTIER_TEST_THREADS_LEFT = '${left}';
    await createExecutor(options).catch((error) => console.log(error.code, error.message));
    delete process.env.KVTIER_TEST_THREADS_LEFT;
    const executor = await createExecutor(options);
    console.log(executor.blockCount);
    const arena = native.arenaCreate(${JSON.stringify(join(folder, 'arena'))}, 1 << 20, 1);
    process.env.KVTIER_TEST_THREADS_LEFT = '0';
    // Only its first copies are slower.
    console.log(executor.attachArena(${JSON.stringify(join(folder, 'arena'))}, 1 << 20, native.arenaId(arena)));
    await executor.close();`;
  const args = ['--import', 'tsx', '--input-type=module', '-e', program];
  const env = { ...process.env, LD_PRELOAD: library };
  const { stdout, stderr } = spawnSync(process.execPath, args, { cwd: root, encoding: 'utf8', env });
  expect(stderr).toBe('');
  expect(stdout).toBe(
    'SETUP no further thread can be had (Resource temporarily unavailable); ' +
      'raise the limit of processes (pids.max, RLIMIT_NPROC)\n64\n1\n',
  );
});

/** Where the system has no thread for a pulse, a node goes on without a table of held blocks, and leaves nothing mapped. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const root = fileURLToPath(new URL('../../../..', import.meta.url));

it('an arena without a pulse has no table', () => {
  const [folder, memory] = [join(tmpdir(), 'kvtier-'), '/dev/shm/kvtier-test-'].map((name) => mkdtempSync(name));
  onTestFinished(() => [folder, memory].forEach((path) => void rmSync(path!, { recursive: true })));
  const library = join(folder!, 'no_more_threads.so');
  const source = join(root, 'packages/base/data-plane/cc/test/no_more_threads.cc');
  expect(spawnSync('g++', ['-std=c++20', '-shared', '-fPIC', source, '-o', library]).stderr.toString()).toBe('');
  const program = `
    import { readFileSync } from 'node:fs';
    import { createArenaFile } from ${JSON.stringify(join(root, 'packages/store/node/src/arena-file.ts'))};
    const made = () => {
      const file = createArenaFile(${JSON.stringify(memory)}, ${JSON.stringify(folder)}, 1 << 20);
      const mapped = readFileSync('/proc/self/maps', 'utf8').includes(file.path + '.lock');
      console.log(file.held === null, mapped, file.bytes);
      file.close();
    };
    process.env.KVTIER_TEST_THREADS_LEFT = '0';
    made();
    delete process.env.KVTIER_TEST_THREADS_LEFT;
    made();`;
  const args = ['--import', 'tsx', '--input-type=module', '-e', program];
  const env = { ...process.env, LD_PRELOAD: library };
  const { stdout, stderr } = spawnSync(process.execPath, args, { cwd: root, encoding: 'utf8', env });
  expect(stderr).toBe('');
  expect(stdout).toBe('true false 1048576\nfalse true 1048576\n');
});

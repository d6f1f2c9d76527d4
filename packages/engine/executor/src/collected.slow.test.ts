/** An executor that nobody closes ends when its handle is collected: after the copies that run, the last of which keeps it alive. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const root = fileURLToPath(new URL('../../../..', import.meta.url));

it('lives as long as an export whose arena it still has', () => {
  const folder = mkdtempSync('/dev/shm/kvtier-collected-');
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const [library, arena, begin] = ['library.so', 'arena', 'begin'].map((name) => join(folder, name));
  const held = join(root, 'packages/engine/executor/cc/test/held_exports.cc');
  expect(spawnSync('g++', ['-std=c++20', '-shared', '-fPIC', held, '-o', library!]).stderr.toString()).toBe('');
  const source = (name: string): string => JSON.stringify(join(root, name));
  // In a process of its own: what goes wrong there ends the process.
  const program = `
    import { readFileSync, writeFileSync } from 'node:fs';
    import { setImmediate } from 'node:timers/promises';
    import { native as plane } from '@kvtier/data-plane';
    import { binding } from ${source('packages/engine/executor/src/binding.ts')};
    import { createExecutor } from ${source('packages/engine/executor/src/index.ts')};
    const [path, bytes] = [${JSON.stringify(arena)}, 1 << 20];
    const made = plane.arenaCreate(path, bytes, 1);
    const id = plane.arenaId(made);
    plane.arenaClose(made);
    const native = binding();
    // What a function that waits has had in its hands it keeps: whoever sees the handle has returned.
    const handles = [];
    const openIt = async () => {
      const { open } = native;
      native.open = async (...given) => (handles[0] = await open(...given));
      const modelDir = ${source('test/numerics/golden/llama')};
      await createExecutor({ modelDir, blockTokens: 16, blockCount: 64, threads: 1, maxStepTokens: 256, maxStepSequences: 4 });
    };
    const lookAtIt = () => new WeakRef(handles[0]);
    const exportAndForget = () => {
      const number = native.attachArena(handles[0], path, bytes, id);
      return native.exportBlocks(handles.pop(), number, Int32Array.of(1), Float64Array.of(4096));
    };
    await openIt();
    const handle = lookAtIt();
    const exported = exportAndForget();
    do {
      await setImmediate(); // until then whoever looked at it keeps it
      gc();
      await setImmediate(); // the native half of what was collected ends in a turn of its own
    } while (handle.deref() !== undefined);
    writeFileSync(${JSON.stringify(begin)}, '');
    console.log((await exported).length);
    console.log(readFileSync('/proc/self/maps', 'latin1').includes(path) ? 'mapped' : 'unmapped');`;
  const { status, signal, stdout, stderr } = spawnSync(
    process.execPath,
    ['--expose-gc', '--import', 'tsx', '--input-type=module', '-e', program],
    {
      cwd: join(root, 'packages/engine/executor'),
      encoding: 'utf8',
      env: { ...process.env, LD_PRELOAD: library, KVTIER_TEST_EXPORTS_BEGIN: begin },
      timeout: 30_000,
    },
  );
  expect({ status, signal, stderr }).toEqual({ status: 0, signal: null, stderr: '' });
  expect(stdout).toBe('1\nunmapped\n');
});

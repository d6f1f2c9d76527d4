/**
 * The storage backend under SGLang's own controller, host pools and backend factory (`npm run test:sglang`), on a CPU. Its
 * radix tree is played (real.py).
 */
import { spawnSync } from 'node:child_process';
import path from 'node:path';
import { program } from '@kvtier/cli';
import { describe, expect, it } from 'vitest';
import { folder, output, root } from '../e2e/python.ts';

const [python, ...args] = (process.env.KVTIER_SGLANG_PYTHON ?? 'python3').split(' ');
const here = path.join(root, 'test/sglang');
const hasSglang =
  spawnSync(python!, [...args, '-c', 'import importlib.util as u, sys; sys.exit(u.find_spec("sglang") is None)'], {
    cwd: here,
    timeout: 60_000,
  }).status === 0;

if (!hasSglang) {
  console.warn(`SKIPPED: the storage backend under SGLang's own classes (${python} ${args.join(' ')} has no SGLang)`);
}

describe.skipIf(!hasSglang)("the storage backend under SGLang's own classes", () => {
  it('every layout of every pool, ranks, flushes, pools beside the KV, and whatever the node does', {
    timeout: 15 * 60_000,
  }, async () => {
    const env = {
      ...process.env,
      PYTHONPATH: path.join(folder, 'src'),
      PYTHONDONTWRITEBYTECODE: '1',
      KVTIER_TEST_NODE: JSON.stringify([process.execPath, ...program('cache-node')]),
    };
    expect(await output(python!, [...args, '-m', 'unittest', '-v', 'real'], env, here)).toMatch(/^Ran 6 tests/m);
  });
});

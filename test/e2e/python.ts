/** Tests of the Python package are Python's own (packages/connector/python/tests); this runs a file of them against our cache nodes. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { program } from '@kvtier/cli';
import { expect } from 'vitest';

const root = fileURLToPath(new URL('../..', import.meta.url));
const folder = path.join(root, 'packages/connector/python');
/** Debian's: it has protobuf. */
const python = '/usr/bin/python3';

/** @param what a file, or a class of one: `test_session`, `test_vllm_connector.Faults` */
export async function runsPython(what: string, more: Readonly<Record<string, string>> = {}): Promise<void> {
  const child = spawn(python, ['-X', 'dev', '-W', 'error::ResourceWarning', '-m', 'unittest', '-v', what], {
    cwd: path.join(folder, 'tests'),
    env: {
      ...process.env,
      PYTHONPATH: path.join(folder, 'src'),
      PYTHONDONTWRITEBYTECODE: '1',
      KVTIER_TEST_NODE: JSON.stringify([process.execPath, ...program('cache-node')]),
      ...more,
    },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let text = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk) => {
      text += chunk;
    });
  }
  const [code, signal] = await once(child, 'close');
  expect({ code, signal }, text).toEqual({ code: 0, signal: null });
  expect(text).toMatch(/^Ran [1-9]\d* tests?/m);
}

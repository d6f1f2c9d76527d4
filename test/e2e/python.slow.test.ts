/** The Python package against real cache nodes: its tests are Python's own (packages/connector/python/tests), each file one test here. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { program } from '@kvtier/cli';
import { native } from '@kvtier/data-plane';
import { expect, it } from 'vitest';

const root = fileURLToPath(new URL('../..', import.meta.url));
const folder = path.join(root, 'packages/connector/python');
/** Debian's: it has protobuf. */
const python = '/usr/bin/python3';

async function runs(file: string, more: Readonly<Record<string, string>> = {}): Promise<void> {
  const child = spawn(python, ['-X', 'dev', '-W', 'error::ResourceWarning', '-m', 'unittest', '-v', file], {
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

it('sessions store, load, and outlive the death and the silence of their node', () => runs('test_session'));
it('copies move every layout, find every flipped byte, and keep what they use', () => {
  const lengths = [1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1024, 2047, 2048, 2049, 10_000];
  const sums = lengths.map((bytes) => {
    const data = Uint8Array.from({ length: bytes }, (_, i) => (i * 131) ^ (i >> 8));
    return `${Buffer.from(data).toString('hex')}=${native.xxh3_64(data)}`;
  });
  return runs('test_copies', { KVTIER_TEST_SUMS: sums.join(',') });
});
it('namespaces are those of our own engine', () => runs('test_namespace'));

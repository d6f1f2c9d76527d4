/** Tests of the Python package are Python's own (packages/connector/python/tests); this runs them against our cache nodes. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { program } from '@kvtier/cli';
import { expect } from 'vitest';

export const root = fileURLToPath(new URL('../..', import.meta.url));
export const folder = path.join(root, 'packages/connector/python');
/** It has protobuf. */
export const debians = '/usr/bin/python3';

interface Run {
  readonly python?: string;
  readonly env?: Readonly<Record<string, string>>;
}

/** What a program said; it must end well. */
export async function output(
  file: string,
  args: readonly string[],
  env: NodeJS.ProcessEnv,
  cwd = root,
): Promise<string> {
  const child = spawn(file, args, { cwd, env, stdio: ['ignore', 'pipe', 'pipe'] });
  let text = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk) => {
      text += chunk;
    });
  }
  const [code, signal] = await once(child, 'close');
  expect({ code, signal }, text).toEqual({ code: 0, signal: null });
  return text;
}

/** @param what files, or classes of them: `test_session`, `test_vllm_connector.Faults test_vllm_gpu` */
export async function runs(what: string, { python = debians, env = {} }: Run = {}): Promise<void> {
  const environment = {
    ...process.env,
    PYTHONPATH: path.join(folder, 'src'),
    PYTHONDONTWRITEBYTECODE: '1',
    PYTHONMALLOC: 'pymalloc', // its debug hooks, which '-X dev' brings, watch over extensions' memory: these programs have none
    KVTIER_TEST_NODE: JSON.stringify([process.execPath, ...program('cache-node')]),
    ...env,
  };
  const args = ['-X', 'dev', '-W', 'error::ResourceWarning', '-m', 'unittest', '-v', ...what.split(' ')];
  const said = await output(python, args, environment, path.join(folder, 'tests'));
  if (process.env.KVTIER_BENCH) process.stdout.write(said);
  expect(said).toMatch(/^Ran [1-9]\d* tests?/m);
}

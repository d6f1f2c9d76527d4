/** The Python package against real cache nodes: each file of its tests is one test here. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { native } from '@kvtier/data-plane';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { debians, folder, output, root, runs } from './python.ts';

it('sessions store, load, and outlive the death and the silence of their node', () => runs('test_session'));
it('copies move every layout, find every flipped byte, and keep what they use', () => {
  const lengths = [1, 3, 8, 16, 17, 128, 129, 240, 241, 256, 1024, 2047, 2048, 2049, 10_000];
  const sums = lengths.map((bytes) => {
    const data = Uint8Array.from({ length: bytes }, (_, i) => (i * 131) ^ (i >> 8));
    return `${Buffer.from(data).toString('hex')}=${native.xxh3_64(data)}`;
  });
  return runs('test_copies', { env: { KVTIER_TEST_SUMS: sums.join(',') } });
});
it("copies of a GPU's memory, on the emulator: every layout, every flipped byte, pins refused, a device that hangs", () =>
  runs('test_device_copies'));
it('nothing that a node says harms the engine', () => runs('test_lies'));
it('ten thousand objects of another version are misses', () => runs('test_foreign'));
it('engine and node in containers of their own share arena and socket', () => runs('test_sidecar'));
it('namespaces are those of our own engine', () => runs('test_namespace'));

const hasNvcc = spawnSync('nvcc', ['--version']).status === 0;
it.skipIf(!hasNvcc)("the library's kernels are what nvcc makes of the sources", () =>
  output('node', ['scripts/kernels-ptx.mjs', '--check'], process.env),
);

it('the library is sound under sanitizers', async () => {
  const build = path.join(root, 'build/client-sanitized');
  const options = ['-G', 'Ninja', '-DKVTIER_SANITIZE=ON', '-DCMAKE_BUILD_TYPE=RelWithDebInfo'];
  await output('cmake', ['-S', 'packages/connector/native/cc', '-B', build, ...options], process.env);
  await output('ninja', ['-C', build], process.env);
  const names = ['libasan.so', 'libstdc++.so'];
  const runtimes = names.map((name) => output('g++', [`-print-file-name=${name}`], process.env));
  await runs('test_copies', {
    env: {
      LD_PRELOAD: (await Promise.all(runtimes)).map((file) => file.trim()).join(' '),
      KVTIER_LIBRARY: path.join(build, 'libkvtier.so'),
      ASAN_OPTIONS: 'detect_leaks=0:halt_on_error=1',
      UBSAN_OPTIONS: 'halt_on_error=1:print_stacktrace=1',
      PYTHONMALLOC: 'malloc',
    },
  });
});

describe('the package', () => {
  let place: string;
  beforeEach(() => {
    place = mkdtempSync(path.join(tmpdir(), 'kvtier-wheel-'));
  });
  afterEach(() => rmSync(place, { recursive: true, force: true }));

  /** With Debian's protobuf, and nothing from any network. */
  async function installed(file: string, env: NodeJS.ProcessEnv): Promise<string> {
    const venv = path.join(place, 'venv');
    await output(debians, ['-m', 'venv', '--system-site-packages', venv], process.env);
    const python = path.join(venv, 'bin/python');
    const pip = ['-m', 'pip', 'install', '--no-index', '--disable-pip-version-check', file];
    await output(python, pip, env, place);
    return python;
  }

  it('installs from its wheel on a machine without compilers, and works there', async () => {
    const built = await output(debians, [path.join(folder, 'build_backend.py'), place], process.env);
    const wheel = built.split('\n').find((line) => line.endsWith('.whl'))!;
    const bare = { PATH: path.join(place, 'venv/bin'), HOME: place };
    const python = await installed(wheel, bare);
    const where = 'import kvtier, kvtier.native as n; n.library(); print(n._path())';
    const library = (await output(python, ['-c', where], bare, place)).trim();
    expect(library).toMatch(/venv\/lib\/python3[.]\d+\/site-packages\/kvtier\/libkvtier[.]so$/);
    await runs('test_session', { python, env: { PYTHONPATH: '' } });
  });

  it('builds from its sources alone', async () => {
    const built = await output(debians, [path.join(folder, 'build_backend.py'), place], process.env);
    const sources = built.split('\n').find((line) => line.endsWith('.tar.gz'))!;
    const python = await installed(sources, { PATH: process.env.PATH, HOME: place });
    await runs('test_copies', { python, env: { PYTHONPATH: '' } });
  });
});

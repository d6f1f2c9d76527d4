/** The library of the Python package under sanitizers. It is compiled anew for that, and a file of its own: nothing in it waits. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { afterAll, it } from 'vitest';
import { debians, folder, output, runs } from './python.ts';

const place = mkdtempSync(path.join(tmpdir(), 'kvtier-sanitized-'));
afterAll(() => rmSync(place, { recursive: true, force: true }));

it('is sound under sanitizers, built from its package of sources alone', async () => {
  const built = await output(debians, [path.join(folder, 'build_backend.py'), place], process.env);
  const file = built.split('\n').find((line) => line.endsWith('.tar.gz'))!;
  await output('tar', ['-xzf', file, '-C', place], process.env);
  const [source, build] = [file.replace(/[.]tar[.]gz$/, '/native/cc'), path.join(place, 'sanitized')];
  const options = ['-G', 'Ninja', '-DKVTIER_SANITIZE=ON'];
  await output('cmake', ['-S', source, '-B', build, ...options], process.env, place);
  await output('ninja', ['-C', build], process.env, place);
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

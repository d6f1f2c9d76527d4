/** The Python package as it is packed, installed and started in containers; and what it takes its time for. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { afterAll, beforeAll, describe, expect, it } from 'vitest';
import { debians, folder, output, runs } from './python.ts';

it('a node that gets little of a processor is slow and not silent', () => runs('test_slow_node'));
it('ten thousand objects of another version are misses', () => runs('test_foreign'));
it('engine and node in containers of their own share arena and socket', () => runs('test_sidecar'));

const hasNvcc = spawnSync('nvcc', ['--version']).status === 0;
it.skipIf(!hasNvcc)("the library's kernels are what nvcc makes of the sources", () =>
  output('node', ['scripts/kernels-ptx.mjs', '--check'], process.env),
);

describe('the package', () => {
  let place: string;
  let python: string;
  let built: string[];
  beforeAll(async () => {
    place = mkdtempSync(path.join(tmpdir(), 'kvtier-wheel-'));
    const venv = path.join(place, 'venv');
    python = path.join(venv, 'bin/python');
    const backend = path.join(folder, 'build_backend.py');
    const making = output(debians, [backend, place], process.env);
    // Where the system has pip, that serves: to unpack another takes five seconds of a CPU.
    const pip = spawnSync(debians, ['-c', 'import pip']).status === 0 ? ['--without-pip'] : [];
    await output(debians, ['-m', 'venv', '--system-site-packages', ...pip, venv], process.env);
    built = (await making).split('\n');
  }, 240_000);
  afterAll(() => rmSync(place, { recursive: true, force: true }));

  /** With Debian's protobuf, and nothing from any network. */
  async function install(end: string, env: NodeJS.ProcessEnv): Promise<void> {
    const file = built.find((line) => line.endsWith(end))!;
    const pip = (...args: string[]) =>
      output(python, ['-m', 'pip', '--disable-pip-version-check', ...args], env, place);
    await pip('uninstall', '--yes', 'kvtier');
    await pip('install', '--no-index', file);
  }

  it('installs from its wheel on a machine without compilers, and works there', async () => {
    const bare = { PATH: path.dirname(python), HOME: place };
    await install('.whl', bare);
    const where = 'import kvtier, kvtier.native as n; n.library(); print(n._path())';
    const library = (await output(python, ['-c', where], bare, place)).trim();
    expect(library).toMatch(/venv\/lib\/python3[.]\d+\/site-packages\/kvtier\/libkvtier[.]so$/);
    await runs('test_session.StoresAndLoads', { python, env: { PYTHONPATH: '' } });
  });

  // Once more from the same sources, optimised: half a minute of a core.
  it('builds from its sources alone, by pip', async () => {
    await install('.tar.gz', { PATH: process.env.PATH, HOME: place });
    await runs('test_copies', { python, env: { PYTHONPATH: '' } });
  });
});

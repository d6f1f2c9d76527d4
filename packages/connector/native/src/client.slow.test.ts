/** Builds and runs cc/test/client_test.cc: libkvtier as it ships, where it must not hold up or end the engine. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, expect, it } from 'vitest';

const root = fileURLToPath(new URL('../../../../', import.meta.url));
const cc = join(root, 'packages/connector/native/cc');
const [plane, cuda] = [join(root, 'packages/base/data-plane/cc'), join(root, 'packages/engine/cuda')];
const folder = mkdtempSync(join(tmpdir(), 'kvtier-client-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const gtest = existsSync('/usr/include/gtest/gtest.h');
if (!gtest) console.warn('SKIPPED: libkvtier by its C ABI; install it: apt-get install libgtest-dev');

/** By its path, and found there when it runs. */
const linked = (library: string): string[] => [library, `-Wl,-rpath,${dirname(library)}`];

const build = (...args: string[]): void => {
  const flags = ['-std=c++20', '-O0', '-g1', '-Wall', '-Wextra', '-Werror', '-fno-strict-aliasing'];
  const said = spawnSync('g++', [...flags, ...args]);
  expect(said.stderr.toString()).toBe('');
};

it.skipIf(!gtest)('libkvtier holds up and ends no thread of the engine', { timeout: 240_000 }, () => {
  const [driver, binary] = [join(folder, 'libslow_driver.so'), join(folder, 'client_test')];
  const standin = linked(join(root, 'build/cuda-emulated/libstandin_cuda.so'));
  build('-shared', '-fPIC', join(cc, 'test/slow_driver.cc'), '-Wl,--no-as-needed', ...standin, '-o', driver);
  const sources = [join(cc, 'test/client_test.cc'), join(plane, 'arena.cc'), join(cuda, 'transfer/host_arena.cc')];
  const libraries = [...linked(join(root, 'build/client/libkvtier.so')), '-lgtest', '-pthread', '-ldl'];
  build('-DKVTIER_DRIVER', '-I', plane, '-I', cuda, ...sources, ...libraries, '-rdynamic', '-o', binary);
  // What stands still holds up no other stream where each has a queue of its own. An engine's process has eight.
  for (const [filter, connections] of [
    ['-*HoldsUpNoOtherStreamOfIt', '32'],
    ['*HoldsUpNoOtherStreamOfIt', '8'],
  ] as const) {
    const env = { ...process.env, KVTIER_CUDA_DRIVER: driver, CUDA_DEVICE_MAX_CONNECTIONS: connections };
    const run = spawnSync(binary, [`--gtest_filter=${filter}`], { env });
    if (run.status !== 0) console.error(run.stdout.toString(), run.stderr.toString());
    expect(run.status).toBe(0);
    // Without a test that the filter names it ends well, too, and with a flag that it does not know.
    expect(run.stdout.toString()).toMatch(/\[ {2}PASSED {2}\] [1-9]\d* tests?\./);
  }
});

/** Builds and runs cc/test/identity_test.cc under AddressSanitizer and UBSan: the native half of identity, and of events. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, expect, it } from 'vitest';

const cc = fileURLToPath(new URL('../cc/', import.meta.url));
const golden = fileURLToPath(new URL('../../identity/golden/', import.meta.url));
const folder = mkdtempSync(join(tmpdir(), 'kvtier-identity-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));

const gtest = existsSync('/usr/include/gtest/gtest.h');
if (!gtest) console.warn('SKIPPED: native identity under sanitizers; install it: apt-get install libgtest-dev');

it.skipIf(!gtest)(
  'SHA-256, chains, the object header and skipped numbers of events in C++',
  { timeout: 240_000 },
  () => {
    const binary = join(folder, 'identity_test');
    const sources = [
      'test/identity_test.cc',
      'test/sha256_emulated.cc',
      'sha256.cc',
      'sha256_ni.cc',
      'hash_blocks.cc',
      'kv_events_decode.cc',
    ];
    const flags = ['-std=c++20', '-O0', '-g1', '-march=native', '-Wall', '-Wextra', '-Werror', '-fno-strict-aliasing'];
    const sanitizers = ['-fsanitize=address,undefined', '-fno-sanitize-recover=all'];
    const inputs = sources.map((source) => join(cc, source));
    const build = spawnSync('g++', [...flags, ...sanitizers, ...inputs, '-lgtest', '-pthread', '-o', binary]);
    expect(build.stderr.toString()).toBe('');
    const run = spawnSync(binary, [golden]);
    if (run.status !== 0) console.error(run.stdout.toString(), run.stderr.toString());
    for (const line of run.stdout.toString().split('\n')) if (line.startsWith('MISSED')) console.warn(line);
    expect(run.status).toBe(0);
  },
);

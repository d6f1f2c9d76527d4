/**
 * The kernels of copies as PTX, for libkvtier: it is built and used where there is neither nvcc nor CUDA's runtime.
 *
 *   npm run kernels:ptx               writes packages/engine/cuda/kernels/transfer.ptx
 *   npm run kernels:ptx -- --check    only compares
 */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { root, SetupError, script } from './lib/command.mjs';

const folder = join(root, 'packages/engine/cuda');
const file = join(folder, 'kernels/transfer.ptx');
/** Ampere is the oldest that is served; the version of CUDA 11.0, so that drivers of its time take it. */
const architecture = 'compute_80';
const version = '7.0';

await script(() => {
  const made = compiled();
  if (!process.argv.includes('--check')) {
    writeFileSync(file, made);
  } else if (readFileSync(file, 'utf8') !== made) {
    throw new SetupError(
      `${file} is not what nvcc makes of block_copy.cu, xxh3.cu and xxh3_apart.cu; run: npm run kernels:ptx`,
    );
  }
});

function compiled() {
  const place = mkdtempSync(join(tmpdir(), 'kvtier-ptx-'));
  try {
    const out = join(place, 'transfer.ptx');
    const input = '#include "kernels/block_copy.cu"\n#include "kernels/xxh3.cu"\n#include "kernels/xxh3_apart.cu"\n';
    const options = ['-std=c++20', '--expt-relaxed-constexpr', `-arch=${architecture}`, '-ptx', '-x', 'cu'];
    const run = spawnSync('nvcc', [...options, '-I', folder, '-o', out, '-'], { input, encoding: 'utf8' });
    if (run.status !== 0) {
      const why = run.error?.message ?? run.stderr.trim();
      throw new SetupError(`nvcc cannot compile the kernels of copies (${why}); install CUDA 12 or newer`);
    }
    const lines = readFileSync(out, 'utf8')
      .replace(/^\.version .*$/m, `.version ${version}`)
      .replace(/_ZN\w+kSecretE/g, 'kvtier_xxh3_secret') // else named after a temporary file
      .split('\n')
      .map((line) => line.replace(/\/\/.*$/, '').trimEnd())
      .filter((line) => line !== '');
    return ['// Made by `npm run kernels:ptx` of block_copy.cu, xxh3.cu and xxh3_apart.cu.', ...lines, ''].join('\n');
  } finally {
    rmSync(place, { recursive: true });
  }
}

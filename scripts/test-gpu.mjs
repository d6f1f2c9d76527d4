/**
 * npm run test:gpu [-- --allow-missing]: compiles the CUDA backend and checks it on this machine's GPU: the runtime, every
 * kernel against its CPU reference, then the TypeScript tests that need a GPU. Where there is no GPU or no nvcc it says so in
 * one line and fails; with --allow-missing that is "skipped: ..." and exit code 0.
 */
import { existsSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { foreground, root, SetupError, script } from './lib/command.mjs';
import { hasGpu, hasNvcc } from './lib/native.mjs';
import { closingLine, runVitest } from './lib/vitest.mjs';
import { setup } from './setup.mjs';

const gpuTests = 'packages/engine/executor/src';

/** What of a GPU machine is missing here, in one line. */
function missing() {
  if (!hasGpu()) return 'no GPU on this machine (no /dev/nvidia0, no nvidia-smi)';
  if (!hasNvcc()) return 'nvcc was not found; install the CUDA toolkit 12 or newer';
  return null;
}

async function check(name) {
  const code = await foreground(join(root, 'build/cuda', name), []);
  process.stdout.write(`${code === 0 ? 'ok     ' : 'FAILED '} ${name}\n`);
  return code === 0;
}

await script(async (args) => {
  const unknown = args.filter((arg) => arg !== '--allow-missing');
  if (unknown.length > 0) throw new SetupError(`${unknown[0]}: unknown option; allowed: --allow-missing`);
  const what = missing();
  if (what !== null) {
    if (!args.includes('--allow-missing')) throw new SetupError(`${what}; run this on a machine with an NVIDIA GPU`);
    process.stdout.write(`skipped: ${what}\n`);
    return 0;
  }
  await setup({ need: ['npm', 'native', 'cuda'] });
  let passed = 0;
  let failed = 0;
  for (const name of ['runtime_check', 'kernel_check']) {
    if (await check(name)) passed += 1;
    else failed += 1;
  }
  const hasTests = readdirSync(join(root, gpuTests)).some((file) => file.endsWith('.gpu.slow.test.ts'));
  if (!hasTests || !existsSync(join(root, 'build/cuda/kvtier_cuda.node'))) {
    process.stdout.write('skipped: TypeScript tests on the GPU (there are none)\n');
    closingLine({ passed, failed, skipped: [], flaky: [] });
    return failed > 0 ? 1 : 0;
  }
  process.env.KVTIER_PTXAS = '1';
  const tests = await runVitest(['slow', 'long'], ['.gpu.slow.test.ts', 'cuda-spills']);
  closingLine({ ...tests, passed: tests.passed + passed, failed: tests.failed + failed });
  return tests.code || (failed > 0 ? 1 : 0);
});
